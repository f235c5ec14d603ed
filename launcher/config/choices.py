"""Enumerations of the values of config keys that allow only certain words."""

from __future__ import annotations

from enum import StrEnum

from launcher.config.numerics import add_values, is_added

ClusterKind = StrEnum("ClusterKind", {"local": "local", "slurm": "slurm", "elsewhere": "elsewhere"})
ContainerRuntime = StrEnum("ContainerRuntime", {"pyxis": "pyxis", "apptainer": "apptainer"})
Device = StrEnum("Device", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})
StrategyKind = StrEnum(
    "StrategyKind", {"auto": "auto", "single": "single", "ddp": "ddp", "fsdp": "fsdp", "hsdp": "hsdp"}
)
BestMode = StrEnum("BestMode", {"min": "min", "max": "max"})
Sync = StrEnum(
    "Sync",
    {
        "auto": "auto",
        "every": "every",
        "boundary": "boundary",
        "gather_once": "gather_once",
        "replicas_at_boundary": "replicas_at_boundary",
    },
)


class Compress(StrEnum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"  # refused with a reason
    add_values(vars(), "strategy.compress")

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
    add_values(vars(), "precision")


SumFormat = StrEnum("SumFormat", {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"})
Parameters = StrEnum("Parameters", {"fp32": "fp32", "keep": "keep"})
ShortWindow = StrEnum("ShortWindow", {"exact": "exact", "drop": "drop"})


class Norm(StrEnum):
    leave = "leave"
    sync = "sync"
    freeze = "freeze"
    add_values(vars(), "batch.norm")

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
