"""Enumerations of the values of config keys that allow only certain words, and values that installed packages add.

An entry point ``launcher.numerics`` ``KEY.VALUE = "package.module:name"`` adds ``KEY=VALUE``: ``precision.NAME`` a
class, a ``FloatFormat`` (launcher/plan/float_format.py), ``strategy.compress.NAME`` a function that makes a
``Compression`` (launcher/train/parallel/ddp.py), ``batch.norm.NAME`` a function that makes a ``Normaliser`` which looks
ahead over each window (launcher/train/parallel/batchnorm.py).
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Any

from launcher.targets import entry_point_names, entry_points, load_entry_point

GROUP = "launcher.numerics"
_ADDED: set[str] = set()  # "KEY.VALUE"


def _add_values(members: dict[str, Any], key: str) -> None:
    """Add the values of installed packages to ``members``, the body of the enumeration of ``key``; none replaces a
    value of the core."""
    for name in sorted(entry_point_names(GROUP)):
        place, _, value = name.rpartition(".")
        if place == key and value not in members:
            members[value] = value
            _ADDED.add(name)


def is_added(key: str, value: str) -> bool:
    """Return whether ``KEY=VALUE`` is a value of an installed package."""
    return f"{key}.{value}" in _ADDED


@cache
def added_value(key: str, value: str) -> Any:
    """Return what the entry point of ``KEY=VALUE`` names; None for a value of the core.

    Raises:
        SiteError: it cannot be imported, or two packages add it.
    """
    return load_entry_point(entry_points(GROUP)[f"{key}.{value}"], f"{key}={value}") if is_added(key, value) else None


ClusterKind = StrEnum("ClusterKind", {"local": "local", "slurm": "slurm", "elsewhere": "elsewhere"})
ContainerRuntime = StrEnum("ContainerRuntime", {"pyxis": "pyxis", "apptainer": "apptainer"})
Device = StrEnum("Device", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})
StrategyKind = StrEnum(
    "StrategyKind", {"auto": "auto", "single": "single", "ddp": "ddp", "fsdp": "fsdp", "hsdp": "hsdp"}
)
BestMode = StrEnum("BestMode", {"min": "min", "max": "max"})
Sync = StrEnum(
    "Sync", {"auto": "auto", "every": "every", "boundary": "boundary", "gather_once": "gather_once",
             "replicas_at_boundary": "replicas_at_boundary"},
)  # fmt: skip


class Compress(StrEnum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"  # refused with a reason
    _add_values(vars(), "strategy.compress")

    @property
    def keeps_residue(self) -> bool:
        """True for one of an installed package: what is not sent in one step is added to the next gradient."""
        return is_added("strategy.compress", self)


Recompute = StrEnum("Recompute", {"none": "none", "blocks": "blocks"})


class PrecisionKind(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    _add_values(vars(), "precision")


SumFormat = StrEnum("SumFormat", {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"})
Parameters = StrEnum("Parameters", {"fp32": "fp32", "keep": "keep"})
ShortWindow = StrEnum("ShortWindow", {"exact": "exact", "drop": "drop"})


class Norm(StrEnum):
    leave = "leave"
    sync = "sync"
    freeze = "freeze"
    _add_values(vars(), "batch.norm")

    @property
    def looks_ahead(self) -> bool:
        """True for one of an installed package: the statistics are those of the window, known before it runs."""
        return is_added("batch.norm", self)


Balance = StrEnum("Balance", {"none": "none", "length": "length"})
OnOom = StrEnum("OnOom", {"stop": "stop", "shrink": "shrink"})
OnNonfinite = StrEnum("OnNonfinite", {"stop": "stop", "skip": "skip"})
OptimizerKind = StrEnum("OptimizerKind", {"adamw": "adamw", "sgd": "sgd", "custom": "custom"})
LrScaling = StrEnum("LrScaling", {"none": "none", "linear": "linear", "sqrt": "sqrt"})
ScheduleKind = StrEnum(
    "ScheduleKind",
    {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "wsd", "custom": "custom"},
)
OnError = StrEnum("OnError", {"stop": "stop", "continue": "continue"})
WandbMode = StrEnum("WandbMode", {"offline": "offline", "online": "online", "disabled": "disabled"})
