"""Rules of precision=float8: what it needs, and what the plan says about it."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from functools import cache

from launcher.config.choices import Float8Recipe
from launcher.config.schema import ClusterKind, Config, Device, PrecisionConfig, PrecisionKind
from launcher.errors import ConfigError
from launcher.plan import host
from launcher.plan.gpus import find_gpu
from launcher.plan.launch_plan import ClusterPlan
from launcher.plan.run_plan import PrecisionPlan

INSTALL = "Install it: pip install 'launcher[float8]'."


def no_units(device: str) -> ConfigError:
    """Return the error that ``device`` has no arithmetic units for float8."""
    return ConfigError(
        "precision", "float8", f"{device} has no float8 units; GPUs have them since compute capability 8.9 (L4, H100).",
        "Use precision=bf16. precision.float8_emulate=true computes the same numbers slowly on any device, for tests.",
    )  # fmt: skip


def no_layers(exclude: list[str]) -> ConfigError:
    """Return the error that float8 would have no effect on the model."""
    return ConfigError(
        "precision", "float8", "no layer of the model can be computed in float8: it needs an nn.Linear whose two sizes "
        f"are multiples of 16, which is not the output head, and matches none of precision.float8_exclude={exclude}.",
        "Use precision=bf16.",
    )  # fmt: skip


def require_units(config: PrecisionConfig, cluster: ClusterPlan) -> None:
    """Check the options of float8, and that the plan's device has units for it, as far as the config says.

    Raises:
        ConfigError: it has not; or an option is no regular expression.
    """
    if config.kind is not PrecisionKind.float8:
        return
    for pattern in config.float8_exclude or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError("precision.float8_exclude", pattern, f"is not a regular expression: {error}.") from None
    if config.float8_emulate:
        return
    if cluster.gpu is not None and find_gpu(cluster.gpu).fp8 is None:
        raise no_units(cluster.gpu.upper())
    if cluster.device is Device.cpu:
        raise no_units("a CPU")


def require_float8(config: Config, cluster: ClusterPlan) -> None:
    """Check that torchao is installed, and that this machine's GPUs have units if the job runs on them.

    Raises:
        ConfigError: it is not, or they have not.
    """
    if config.precision.kind is not PrecisionKind.float8:
        return
    # an image has packages of its own
    if config.cluster.container is None and importlib.util.find_spec("torchao") is None:
        raise ConfigError("precision", "float8", "torchao is not installed.", INSTALL)
    here = cluster.kind is ClusterKind.local and cluster.gpu is None and not config.precision.float8_emulate
    if here and host.computes(PrecisionKind.float8, cluster.device, os.environ) is False:
        raise no_units(host.device_model(cluster.device) or "this machine's GPU")


def float8_notes(precision: PrecisionPlan, layers: tuple[int, ...] | None, *, compiles: bool) -> list[str]:
    """Return the notes of a plan.

    Args:
        layers: linear layers in float8, and all; None if the model was not inspected.
        compiles: train.compile.

    Raises:
        ConfigError: no layer can be computed in float8.
    """
    if precision.kind is not PrecisionKind.float8:
        return []
    notes: list[str] = []
    if layers is not None:
        chosen, every = layers
        if not chosen:
            raise no_layers(precision.float8_exclude)
        notes.append(f"{chosen} of {every} linear layers compute in float8, all else in bf16.")
    if precision.float8_recipe is not Float8Recipe.rowwise_with_gw_hp:
        notes.append(
            f"precision.float8_recipe={precision.float8_recipe.value} scales over the tokens of a micro-batch: the "
            "gradient depends on how samples are divided into micro-batches. rowwise_with_gw_hp does not."
        )
    if precision.float8_emulate:
        notes.append("precision.float8_emulate: products are rounded to float8 and computed in fp32: slow, for tests.")
    elif not compiles:
        notes.append(
            "precision=float8 without train.compile=true is slower than bf16: nothing fuses the conversions to float8."
        )
    return notes


# what torchao 0.18 logs when it is imported, which transformers and peft do too: libraries with kernels for other
# machines and formats, which are not used here, and its use of a function of torch that is deprecated since torch 2.13
_KNOWN_MESSAGES = {
    "torchao": re.compile("Failed to load .*_C.*[.]so|Skipping import of cpp extensions"),
    "torch.utils._pytree": re.compile(r"register_constant\(\) on Enum subclasses is deprecated"),
}


@cache
def quiet_torchao() -> None:
    """Hide the messages that torchao logs whenever it is imported."""
    for name, pattern in _KNOWN_MESSAGES.items():
        logging.getLogger(name).addFilter(lambda record, known=pattern: known.search(record.getMessage()) is None)
