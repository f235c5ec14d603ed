"""Values of the config keys that allow only certain words."""

from __future__ import annotations

from enum import StrEnum


class ClusterKind(StrEnum):
    local = "local"
    hosts = "hosts"
    slurm = "slurm"
    elsewhere = "elsewhere"


class ContainerRuntime(StrEnum):
    pyxis = "pyxis"
    apptainer = "apptainer"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class StrategyKind(StrEnum):
    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class BestMode(StrEnum):
    min = "min"
    max = "max"


class Sync(StrEnum):
    auto = "auto"
    every = "every"
    boundary = "boundary"
    gather_once = "gather_once"
    replicas_at_boundary = "replicas_at_boundary"


class Compress(StrEnum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"  # refused with a reason
    powersgd = "powersgd"


class Recompute(StrEnum):
    none = "none"
    blocks = "blocks"


class PrecisionKind(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    float8 = "float8"


class SumFormat(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Float8Recipe(StrEnum):
    rowwise_with_gw_hp = "rowwise_with_gw_hp"
    rowwise = "rowwise"
    tensorwise = "tensorwise"


class Parameters(StrEnum):
    fp32 = "fp32"
    keep = "keep"


class ShortWindow(StrEnum):
    exact = "exact"
    drop = "drop"


class Norm(StrEnum):
    leave = "leave"
    sync = "sync"
    freeze = "freeze"
    window = "window"


class Balance(StrEnum):
    none = "none"
    length = "length"


class OnOom(StrEnum):
    stop = "stop"
    shrink = "shrink"


class OnNonfinite(StrEnum):
    stop = "stop"
    skip = "skip"


class OuterKind(StrEnum):
    none = "none"
    diloco = "diloco"


class OptimizerKind(StrEnum):
    adamw = "adamw"
    sgd = "sgd"
    custom = "custom"


class LrScaling(StrEnum):
    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class ScheduleKind(StrEnum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    custom = "custom"


OnError = StrEnum("OnError", {"stop": "stop", "continue": "continue"})  # a keyword cannot be written in a class


class WandbMode(StrEnum):
    offline = "offline"
    online = "online"
    disabled = "disabled"
