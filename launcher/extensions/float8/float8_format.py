"""Format of precision=float8: what it needs, what the plan says about it, and which layers it changes."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.config.schema import ClusterKind, Device
from launcher.errors import ConfigError
from launcher.extensions.float8.float8_keys import Float8Config, Float8Recipe
from launcher.plan import host
from launcher.plan.float_format import FloatFormat, Settings
from launcher.plan.gpus import find_gpu
from launcher.plan.launch_plan import ClusterPlan
from launcher.process import quiet_torchao

if TYPE_CHECKING:
    import torch
    from torch import nn

_INSTALL = "Install it: pip install 'samebatch[float8]'."
# torch's float8 products need sizes that are multiples of this (torch._scaled_mm)
MULTIPLE = 16
# least compute capability of GPUs with units: CUDA programming guide, tensor cores
_CAPABILITY = 8.9


class _Float8:
    """Format float8 (e4m3); see ``launcher.plan.float_format.FloatFormat``."""

    units = "fp8"
    roundoff = 2.0**-4

    def __init__(self, settings: Settings) -> None:
        self._keys = settings.extension(Float8Config)

    def check(self, cluster: ClusterPlan) -> None:
        for pattern in self._keys.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError("float8.exclude", pattern, f"is not a regular expression: {error}.") from None
        if self._keys.emulate:
            return
        if cluster.gpu is not None and find_gpu(cluster.gpu).fp8 is None:
            raise self.no_units(cluster.gpu.upper())
        if cluster.device is Device.cpu:
            raise self.no_units("a CPU")

    def check_machine(self, cluster: ClusterPlan) -> None:
        # an image has packages of its own
        if (cluster.slurm is None or cluster.slurm.container is None) and importlib.util.find_spec("torchao") is None:
            raise ConfigError("precision", "float8", "torchao is not installed.", _INSTALL)
        here = cluster.kind == ClusterKind.local and cluster.gpu is None and not self._keys.emulate
        if here and host.gpus_have(_CAPABILITY) is False:
            raise self.no_units(host.device_model(cluster.device) or "this machine's GPU")

    def no_units(self, device: str) -> ConfigError:
        return ConfigError(
            "precision", "float8",
            f"{device} has no float8 units; GPUs have them since compute capability 8.9 (L4, H100).",
            "Use precision=bf16. float8.emulate=true computes the same numbers slowly on any device, for tests.",
        )  # fmt: skip

    def computes(self, device: torch.device) -> bool:
        import torch

        return self._keys.emulate or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))

    def text(self) -> str:
        return f"float8 ({self._keys.recipe.value}{', emulated' if self._keys.emulate else ''})"

    def notes(self, layers: tuple[int, ...] | None, *, compiles: bool) -> list[str]:
        notes: list[str] = []
        if layers is not None:
            chosen, every = layers
            if not chosen:
                raise _no_layers(self._keys.exclude)
            notes.append(f"{chosen} of {every} linear layers compute in float8, all else in bf16.")
        if self._keys.recipe is not Float8Recipe.rowwise_with_gw_hp:
            notes.append(
                f"float8.recipe={self._keys.recipe.value} scales over the tokens of a micro-batch: the "
                "gradient depends on how samples are divided into micro-batches. rowwise_with_gw_hp does not."
            )
        if self._keys.emulate:
            notes.append("float8.emulate: products are rounded to float8 and computed in fp32: slow, for tests.")
        elif not compiles:
            notes.append(
                "precision=float8 without train.compile=true is slower than bf16: nothing fuses the conversions to "
                "float8."
            )
        return notes

    def layers(self, model: nn.Module) -> dict[str, nn.Linear]:
        return float8_layers(model, self._keys.exclude)

    def convert(self, model: nn.Module) -> None:
        """Change the class of the layers: each stays the same object with the same parameters, hooks and names."""
        layers = self.layers(model)
        if not layers:
            raise _no_layers(self._keys.exclude)
        from torch.utils._python_dispatch import _disable_current_modes

        try:
            quiet_torchao()
            with _disable_current_modes():  # constants of torchao must be real tensors
                from launcher.extensions.float8.float8_linear import float8_class
        except ImportError as error:
            raise ConfigError("precision", "float8", f"torchao cannot be imported: {error}.", _INSTALL) from None
        for layer in layers.values():
            layer.__class__ = float8_class(type(layer), self._keys.recipe.value, self._keys.emulate)


FLOAT8: type[FloatFormat] = _Float8


def _no_layers(exclude: list[str]) -> ConfigError:
    """Return the error that float8 would have no effect on the model."""
    return ConfigError(
        "precision", "float8", "no layer of the model can be computed in float8: it needs an nn.Linear whose two sizes "
        f"are multiples of 16, which is not the output head, and matches none of float8.exclude={exclude}.",
        "Use precision=bf16.",
    )  # fmt: skip


def float8_layers(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers that can be computed in float8, by name.

    A layer must compute what nn.Linear does, with a weight that only linear and convolution layers use. The output head
    (``get_output_embeddings`` of the model or of a part of it) is not among them: its rounding errors reach the loss
    directly.

    Args:
        exclude: regular expressions of the names of layers that stay as they are.
    """
    from torch import nn

    from launcher.train.parallel.mixed_precision import class_before_format, matmul_parameters

    multiplied, heads = matmul_parameters(model), _heads(model)
    found: dict[str, nn.Linear] = {}
    excluded: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if any(re.search(pattern, name) for pattern in exclude):
            excluded.add(module)
        plain = class_before_format(module)
        is_linear = issubclass(plain, nn.Linear) and plain.forward is nn.Linear.forward
        if not is_linear or "forward" in vars(module) or module in heads:
            continue
        weight = module._parameters.get("weight")  # not an attribute that a parametrization computes
        fits = weight is not None and weight in multiplied and not any(size % MULTIPLE for size in weight.shape)
        if fits and isinstance(module, nn.Linear) and module not in found.values():
            found[name] = module
    return {name: module for name, module in found.items() if module not in excluded}


def _heads(model: nn.Module) -> set[nn.Module]:
    from torch import nn

    heads: set[nn.Module] = set()
    for module in model.modules():
        method = getattr(module, "get_output_embeddings", None)
        try:
            head = method() if callable(method) else None
        except NotImplementedError:  # transformers: a model without a head
            head = None
        if isinstance(head, nn.Module):
            heads.update(head.modules())
    return heads
