"""RunPlan: everything that was decided before the start, frozen, saved as plan.json. A worker reads nothing else.

``launcher.plan.solve`` makes it. It is complete: nothing downstream derives any of it a second time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.config.schema import (
    Compress,
    LrScaling,
    OnError,
    OptimizerKind,
    Parameters,
    PrecisionKind,
    Recompute,
    ScheduleKind,
    ShortWindow,
    StrategyKind,
    Sync,
    WandbMode,
)
from launcher.plan.batch import Batch
from launcher.plan.launch_plan import LaunchPlan
from launcher.rundir.files import read_json


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """``samples``: the length of the training data, None for a stream. ``parameters``, ``gradient_bytes``: of what is
    trained; ``unit_parameters``: how many of them are in shard units; ``batch_norms``: its BatchNorm layers; None where
    the model was not looked at. ``frozen_parameters``: further ones, which get no gradient; ``frozen_unit_parameters``:
    how many of these are in shard units. ``matmul_parameters``, ``unit_matmul_parameters``: how many, frozen ones
    included, belong to linear and convolution layers, which FSDP gathers in bf16 or fp16. ``narrow_parameters``: how
    many trained ones model() returns in bf16 or fp16.
    ``data_notes``: what is not used of a DataLoader. ``flops_per_sample``: forward and backward, counted where the
    task has no such method; None where it has, or where they could not be counted. ``in_eval_mode``: modules that
    ``model()`` returns in eval mode, without those inside them; an empty name is the model itself."""

    target: str
    params: dict[str, Any]
    samples: int | None
    parameters: int | None
    gradient_bytes: int | None
    unit_parameters: int | None
    batch_norms: int | None = None
    matmul_parameters: int | None = None
    unit_matmul_parameters: int | None = None
    data_notes: tuple[str, ...] = ()
    flops_per_sample: float | None = None
    frozen_parameters: int = 0
    frozen_unit_parameters: int = 0
    in_eval_mode: tuple[str, ...] = ()
    narrow_parameters: int | None = None

    @classmethod
    def unknown(cls, samples: int | None) -> Self:
        """For a loop of the user's own."""
        return cls(target="", params={}, samples=samples, parameters=None, gradient_bytes=None, unit_parameters=None)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """``windows``: in one epoch, None for a stream. ``short_window``: samples of the last one, 0 if it is full."""

    windows: int | None
    short_window: int
    short_window_policy: ShortWindow


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one sync policy would do to a rank in a full window.

    ``wire_s``: its wire bytes at the link's rate, None where that is not known. ``peak_bytes``: memory of parameters,
    gradients, optimizer and activations at once, None where it was not predicted.
    """

    sync: Sync
    payload_bytes: int
    wire_bytes: int
    wire_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """``sync``: never auto; ``sync_reason``: why this one; ``forecasts``: of each policy that the strategy has.
    ``shard_size``: ranks that share one copy of the model. ``memory_bytes``: what a rank has, where that was asked.
    ``rehearses``: whether calibration may hold the whole model, which a window without communication needs. Predicted
    bytes: of one rank in a full window."""

    kind: StrategyKind
    sync: Sync
    sync_reason: str
    shard_size: int
    bucket_mb: float
    static_graph: bool
    find_unused_parameters: bool
    compress: Compress
    powersgd_rank: int
    powersgd_start: int
    recompute: Recompute
    cpu_offload: bool
    forecasts: tuple[Forecast, ...]
    memory_bytes: int | None
    rehearses: bool
    payload_bytes: int | None
    payload_bytes_every: int | None
    wire_bytes: int | None
    wire_bytes_every: int | None


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """``reduce_dtype``: of gradients between ranks, where the model is sharded. ``kind``: auto until the workers of the
    run's first start have decided. ``reason``: why this kind; empty where the user chose it. ``parameters``: what
    becomes of trained parameters in bf16 or fp16. ``tf32``: whether a GPU's fp32 products and convolutions use TF32."""

    kind: PrecisionKind
    reduce_dtype: PrecisionKind
    init_scale: float
    growth_interval: int
    reason: str = ""
    parameters: Parameters = Parameters.fp32
    tf32: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """``lr``, ``betas``, ``eps``: after ``lr_scaling``; ``base_lr``, ``base_betas``, ``base_eps``: as the user gave
    them, None in plans of earlier versions, which scaled the rate only."""

    kind: OptimizerKind
    lr: float
    base_lr: float
    lr_scaling: LrScaling
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float
    nesterov: bool
    base_betas: tuple[float, float] | None = None
    base_eps: float | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """``steps``: of the job whose schedule this is, where it is not the run's own: a drill runs the first windows of a
    longer job."""

    kind: ScheduleKind
    warmup_steps: int
    min_ratio: float
    steps: int | None = None

    def factor(self, step: int, steps: int | None) -> float:
        """Return the multiple of the learning rate that optimizer step ``step`` (from 0) of ``steps`` applies.

        It is ``min_ratio`` after step ``steps``: the last step still has a part of the fall left, as with torch's
        CosineAnnealingLR(T_max=steps).
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind is ScheduleKind.constant or steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.kind is ScheduleKind.cosine else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * fall


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """``steps``: optimizer steps, None only for epochs over a stream. ``epochs``: None where steps were given.
    ``hang_timeout``: seconds; ``straggler_share``: of a step; None: none is looked for. ``calibrate_s``: seconds at
    most; None: a share of the run's time; 0 for plans of versions that calibrated during training."""

    steps: int | None
    epochs: int | None
    clip_norm: float | None
    seed: int
    deterministic: bool
    compile: bool
    log_every: int
    eval_every: int
    loader_workers: int
    hang_timeout: float | None = None
    straggler_share: float | None = None
    calibrate_s: float | None = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    enabled: bool
    every: int | None
    every_minutes: float | None
    keep: int | None
    async_save: bool = False
    on_error: OnError = OnError.stop


@dataclass(frozen=True, kw_only=True)
class WandbPlan:
    mode: WandbMode
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]
    notes: str | None = None
    job_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fewer:
    """What is different in the plan of a job on fewer hosts, ``nodes``; all else is the same."""

    nodes: int
    batch: Batch
    strategy: StrategyPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunPlan(LaunchPlan):
    """A training job. ``notes``: what the user should know before it starts. ``forced``: config keys that the user has
    changed on the way, and insisted on: `launch resume --force`. ``fewer``: for each smaller number of hosts that it
    may have."""

    batch: Batch
    epoch: EpochPlan
    task: TaskPlan
    strategy: StrategyPlan
    precision: PrecisionPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    train: TrainPlan
    checkpoint: CheckpointPlan
    wandb: WandbPlan
    notes: tuple[str, ...]
    forced: tuple[str, ...] = ()
    fewer: tuple[Fewer, ...] = ()

    def on(self, nodes: int) -> Self:
        plan = super().on(nodes)
        if nodes == self.cluster.nodes:
            return plan
        there = next(world for world in self.fewer if world.nodes == nodes)
        fewer = tuple(world for world in self.fewer if world.nodes < nodes)
        return dataclasses.replace(plan, batch=there.batch, strategy=there.strategy, notes=there.notes, fewer=fewer)

    def with_fewer(self, plans: Iterable[Self]) -> Self:
        """This plan, on the most hosts, together with those of the same job on fewer."""
        fewer = (
            Fewer(nodes=plan.cluster.nodes, batch=plan.batch, strategy=plan.strategy, notes=plan.notes)
            for plan in plans
        )
        return dataclasses.replace(self, fewer=tuple(fewer))

    def with_precision(self, kind: PrecisionKind, reason: str) -> Self:
        """This plan with ``precision=auto`` decided."""
        return dataclasses.replace(self, precision=dataclasses.replace(self.precision, kind=kind, reason=reason))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the plan in ``path``, with the precision that the run's first start has decided."""
        plan = super().load(path)
        if plan.precision.kind is not PrecisionKind.auto or (found := read_json(plan.paths.precision)) is None:
            return plan
        return plan.with_precision(PrecisionKind(found["kind"]), found["reason"])

    @property
    def schedule_steps(self) -> int | None:
        """Optimizer steps that the learning rate's schedule is laid out over."""
        return self.train.steps if self.schedule.steps is None else self.schedule.steps
