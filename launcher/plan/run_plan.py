"""RunPlan: every decision made before the start, frozen and saved as plan.json. A worker reads nothing else.

``launcher.plan.solve`` creates it. It is complete: nothing downstream derives any part of it again. A part that extends
a config group has the group's keys, with no default left open, and what follows from them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

from launcher.config.choices import SumFormat
from launcher.config.schema import (
    CheckpointConfig,
    OptimizerConfig,
    Parameters,
    PrecisionConfig,
    PrecisionKind,
    ScheduleConfig,
    ScheduleKind,
    ShortWindow,
    StrategyConfig,
    Sync,
    TrainConfig,
    WandbConfig,
    facts_by_key,
)
from launcher.plan.batch import Batch, require_tokens
from launcher.plan.initial_weights import InitialWeights
from launcher.plan.launch_plan import LaunchPlan, SitesPlan
from launcher.plan.sync_policy import transfers_per_window
from launcher.plan.windows import StreamInfo
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class SchedulePlan(ScheduleConfig):
    """Learning rate schedule.

    Attributes:
        steps: length of the schedule if it differs from the run's: a drill runs the first windows of a longer job.
    """

    min_ratio: float = 0.0
    decay_share: float = 0.2
    steps: int | None = None

    @property
    def name(self) -> str:
        """Return the kind, or the class of a custom schedule."""
        return self.target or self.kind.value

    def factors(self, steps: int | None) -> Callable[[int], float]:
        """Return the function of the optimizer step, see ``factor``."""
        return lambda step: self.factor(step, steps)

    def factor(self, step: int, steps: int | None) -> float:
        """Return the multiple of the learning rate that optimizer step ``step`` (from 0) of ``steps`` applies.

        It reaches ``min_ratio`` only after the last step, as with torch's CosineAnnealingLR(T_max=steps).
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind is ScheduleKind.constant or steps is None:
            return 1.0
        start = self.warmup_steps
        if self.kind is ScheduleKind.wsd:
            start = max(start, steps - round(self.decay_share * steps))
        progress = min(1.0, max(0, step - start) / max(1, steps - start))
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.kind is ScheduleKind.cosine else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * fall


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted cost of one sync policy for one rank in a full window.

    Attributes:
        peak_bytes: peak memory of parameters, gradients, optimizer and activations; None if not predicted.
        least_bytes: what parameters, gradients and optimizer state need; None if unknown, or if the peak is predicted.
    """

    sync: Sync
    payload_bytes: int
    wire_bytes: int
    peak_bytes: int | None
    least_bytes: int | None = None


@dataclass(frozen=True)
class NoForecast:
    """Answer of a forecast (entry point ``launcher.forecasts``) that cannot predict a plan's memory.

    Attributes:
        reason: without a full stop, for the plan's note.
        traffic: the policies' bytes of the sharded model, if they are known.
    """

    reason: str
    traffic: Sequence[Forecast] = ()


def predicted_metrics(plan: RunPlan) -> dict[str, float]:
    """Return the metrics ``predicted/*`` of a full window, as far as they are known."""
    metrics, forecast = dict[str, float](), plan.strategy.forecast
    # the lengths of a window's samples may determine its number of micro-batches
    few, more = (transfers_per_window(plan.strategy.kind, plan.strategy.sync, count) for count in (2, 3))
    if forecast is not None and plan.batch.world_size > 1 and (plan.batch.micro_tokens is None or few == more):
        metrics["predicted/wire_bytes"] = forecast.wire_bytes
    if forecast is not None and forecast.peak_bytes is not None:
        metrics["predicted/peak_bytes"] = forecast.peak_bytes
    return metrics


Part = TypeVar("Part")


def solved_part(part: type[Part], config: object, **solved: Any) -> Part:
    """Return a part of the plan that extends a config group.

    It has the group's values, except that None becomes the default of ``part`` if that declares the key again.

    Args:
        solved: values that replace those of the group, or that the group does not have.
    """
    own = part.__annotations__
    values = {name: value for name, value in vars(config).items() if value is not None or name not in own}
    return part(**(values | solved))


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Description of the task's model and data. A count is None if the model was not inspected.

    Attributes:
        samples: number in an epoch, the length of the training data or of the task's own order; None for a stream.
        parameters, gradient_bytes: of the trained parameters.
        unit_parameters: trained parameters within shard units.
        batch_norms: number of BatchNorm layers.
        one_value_norm: the first BatchNorm that has one value per channel if a micro-batch has one sample, on which it
            fails; empty if there is none, None if that is not known.
        matmul_parameters, unit_matmul_parameters: parameters of linear and convolution layers (whole model, within
            shard units), frozen ones included; FSDP gathers them in bf16 or fp16.
        data_notes: features of the user's DataLoader that are not used.
        compiles: the part of the model that is compiled without train.compile; empty if none is known.
        flops_per_sample: forward and backward, counted because the task has no such method; None if it has one, or if
            counting failed.
        frozen_parameters, frozen_unit_parameters: parameters without gradient (whole model, within shard units).
        in_eval_mode: outermost modules that ``model()`` returns in eval mode; an empty name is the model itself.
        narrow_parameters: trained parameters that ``model()`` returns in bf16 or fp16.
        format_layers: linear layers in the format that a package adds to ``precision``, and all; None without one.
        group_parameters: trained parameters in no group of the optimizer, and in each group.
        own_optimizer, own_schedule, own_order: the task has a method of that name, which is used.
        eval_sets: names of the held-out data sets, "" for a single one; empty: there is none; None: not known.
        lengths: samples have known lengths; None if that is not known.
        window_loss: the loss is a function of all samples of a window, ``window_loss`` of what ``outputs`` returns.
        stream: shards of the training data, or its ready batches; None if it is map-style, or is not known.
        tokens_per_sample: tokens of each sample, by the task's own statement; None without one.
    """

    target: str
    params: dict[str, Any]
    samples: int | None
    parameters: int | None
    gradient_bytes: int | None
    unit_parameters: int | None
    batch_norms: int | None = None
    one_value_norm: str | None = None
    matmul_parameters: int | None = None
    unit_matmul_parameters: int | None = None
    data_notes: tuple[str, ...] = ()
    compiles: str = ""
    flops_per_sample: float | None = None
    frozen_parameters: int = 0
    frozen_unit_parameters: int = 0
    in_eval_mode: tuple[str, ...] = ()
    narrow_parameters: int | None = None
    format_layers: tuple[int, ...] | None = None
    group_parameters: tuple[int, ...] | None = None
    own_optimizer: bool = False
    own_schedule: bool = False
    eval_sets: tuple[str, ...] | None = None
    own_order: bool = False
    lengths: bool | None = None
    window_loss: bool = False
    stream: StreamInfo | None = None
    tokens_per_sample: int | None = None

    @classmethod
    def unknown(cls, samples: int | None, tokens_per_sample: int | None = None) -> Self:
        """Return the plan for a user's own training loop, whose model is not inspected."""
        return cls(
            target="", params={}, samples=samples, parameters=None, gradient_bytes=None, unit_parameters=None,
            tokens_per_sample=require_tokens(tokens_per_sample),
        )  # fmt: skip

    def trained_bytes(self, formats: Parameters) -> int | None:
        """Return the bytes of the trained parameters, and of their gradients, in the job; None if they are unknown."""
        widened = 2 * (self.narrow_parameters or 0) if formats is Parameters.fp32 else 0  # two bytes become four
        return None if self.gradient_bytes is None else self.gradient_bytes + widened


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Windows of one epoch.

    Attributes:
        windows: number per epoch; None for a stream.
        short_window: samples in the last window; 0 if it is full.
    """

    windows: int | None
    short_window: int
    short_window_policy: ShortWindow


@dataclass(frozen=True, kw_only=True)
class StrategyPlan(StrategyConfig):
    """Parallel strategy with its sync policy. Bytes are predicted for one rank in a full window.

    Attributes:
        kind, sync: the chosen ones, never auto.
        kind_reason: why the strategy was chosen; empty if the user named it.
        sync_reason: why it was chosen.
        shard_size: ranks that share one copy of the model; 1 for single and ddp.
        rehearses: whether calibration may hold the whole model, which a window without communication needs.
        forecasts: one for each policy of the strategy.
        memory_bytes: memory of a rank's device; None if it was not queried.
    """

    shard_size: int = 1
    bucket_mb: float = 25.0
    sync_reason: str
    kind_reason: str = ""
    rehearses: bool
    forecasts: tuple[Forecast, ...] = ()
    memory_bytes: int | None = None

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the chosen policy; None if there is none."""
        return self.forecast_of(self.sync)

    def forecast_of(self, sync: Sync) -> Forecast | None:
        """Return the forecast of the policy ``sync``; None if there is none."""
        return next((forecast for forecast in self.forecasts if forecast.sync is sync), None)


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan(PrecisionConfig):
    """Number formats. ``kind`` is auto until the workers decide at the run's first start.

    Attributes:
        reason: reason for ``kind``; empty if the user chose it.
    """

    reduce_dtype: SumFormat = SumFormat.fp32
    init_scale: float = 65536.0
    growth_interval: int = 2000
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan(OptimizerConfig):
    """Optimizer settings.

    Attributes:
        lr, betas, eps, groups: values after ``lr_scaling``.
        arguments: of a custom class, without lr.
        base_lr, base_betas, base_eps: values as configured.
    """

    weight_decay: float = 0.0
    groups: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    base_lr: float
    base_betas: list[float] | None = None
    base_eps: float | None = None

    @property
    def name(self) -> str:
        """Return the kind, or the class of a custom optimizer."""
        return self.target or self.kind.value

    @property
    def names_classes(self) -> bool:
        """Return whether an optimizer is a class of the user's choice."""
        return self.target is not None or any("_target_" in group for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class TrainPlan(TrainConfig):
    """Training settings. ``steps`` is None only for epochs over a stream.

    Attributes:
        data_shards: solved; 1: a stream is not divided.
        calibrate_s: limit in seconds; None: a share of the run's time.
    """

    data_shards: int = 1
    calibrate_s: float | None


@dataclass(frozen=True, kw_only=True)
class FewerHosts:
    """Part of the plan that differs on ``nodes`` hosts, fewer than planned."""

    nodes: int
    batch: Batch
    strategy: StrategyPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunPlan(LaunchPlan):
    """Plan of a training job.

    Attributes:
        notes: what the user should know before the start.
        callbacks: ``_target_`` and arguments of each, in the order in which they are called.
        trackers: as configured; see ``trackers.installed.mirrors_of``.
        forced: config keys that `launch resume --force` has changed.
        fewer: differences of the plan on each smaller number of hosts that the job may use.
        initial: weights that the run starts with; None: those that the task's model() returns.
        sites: groups of ranks that take steps on their own; ``strategy`` is that of one, ``batch`` that of all.
    """

    batch: Batch
    epoch: EpochPlan
    task: TaskPlan
    strategy: StrategyPlan
    precision: PrecisionPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    train: TrainPlan
    checkpoint: CheckpointConfig
    wandb: WandbConfig
    notes: tuple[str, ...]
    callbacks: tuple[dict[str, Any], ...] = ()
    trackers: tuple[str, ...] = ("wandb",)
    forced: tuple[str, ...] = ()
    fewer: tuple[FewerHosts, ...] = ()
    initial: InitialWeights | None = None
    sites: SitesPlan | None = None

    def on(self, nodes: int) -> Self:
        plan = super().on(nodes)
        if nodes == self.cluster.nodes:
            return plan
        there = next(world for world in self.fewer if world.nodes == nodes)
        fewer = tuple(world for world in self.fewer if world.nodes < nodes)
        return dataclasses.replace(plan, batch=there.batch, strategy=there.strategy, notes=there.notes, fewer=fewer)

    def with_fewer(self, plans: Iterable[Self]) -> Self:
        """Return this plan, which is for the most hosts, extended by ``plans`` of the same job on fewer hosts."""
        fewer = (
            FewerHosts(nodes=plan.cluster.nodes, batch=plan.batch, strategy=plan.strategy, notes=plan.notes)
            for plan in plans
        )
        return dataclasses.replace(self, fewer=tuple(fewer))

    def with_notes(self, notes: Iterable[str]) -> Self:
        """Return this plan with ``notes`` added, for every number of hosts."""
        more = tuple(notes)
        fewer = tuple(dataclasses.replace(world, notes=world.notes + more) for world in self.fewer)
        return dataclasses.replace(self, notes=self.notes + more, fewer=fewer)

    def with_precision(self, kind: PrecisionKind, reason: str) -> Self:
        """Return this plan with ``precision=auto`` resolved to ``kind``."""
        plan = dataclasses.replace(self, precision=dataclasses.replace(self.precision, kind=kind, reason=reason))
        as_predicted = kind in (PrecisionKind.fp32, self.precision.kind)  # auto is predicted as fp32
        return plan if as_predicted else plan._without_forecasts()

    def with_micro_batches(self, batch: Batch) -> Self:
        """Return this plan with ``batch``, which has other micro-batches than were planned and predicted."""
        return dataclasses.replace(self, batch=batch)._without_forecasts()

    def _without_forecasts(self) -> Self:
        return dataclasses.replace(self, strategy=dataclasses.replace(self.strategy, forecasts=()))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the plan in ``path``, with precision=auto replaced by the decision of the run's first start."""
        plan, decision = super().load(path), RunPaths(path.parent).precision  # the run may have been moved
        if plan.precision.kind is not PrecisionKind.auto or (found := read_json(decision)) is None:
            return plan
        return plan.with_precision(PrecisionKind(found["kind"]), found["reason"])

    @classmethod
    def of_record(cls, paths: RunPaths) -> Self | None:
        """Return the plan that the run's record belongs to: that of `launch train`, or of the engine that a script of
        `launch run` has made; None if the script has made none, or none that resumes."""
        if "batch" in (read_json(paths.plan) or {}):
            return cls.load(paths.plan)
        return cls.load(paths.loop_plan) if paths.loop_plan.exists() else None

    def records(self, step: int, window: int) -> bool:
        """Return whether optimizer step ``step``, from 1, is recorded, as far as is known before it. A checkpoint that
        is due by the clock, a stop, and the end of a stream are not.

        Args:
            window: index of its window in the run, from 0.
        """
        train, windows = self.train, self.epoch.windows
        often = (train.log_every, train.eval_every, self.checkpoint.every if self.checkpoint.enabled else 0)
        # the end of an epoch is not known of a stream, and other than this with a ramp; skipped windows defer what is
        # due then
        skipped = window + 1 - step
        may_end = windows is None or bool(self.batch.ramp) or (window + 1) % windows <= skipped
        return self.ends_with(step, window) or any(is_due(every, step, epoch_over=may_end) for every in often)

    def ends_with(self, step: int, window: int) -> bool:
        """Return whether the run ends with optimizer step ``step`` of window ``window``, as far as is known before it.
        See ``records``."""
        train, windows = self.train, self.epoch.windows
        if step == train.steps:
            return True
        return train.epochs is not None and windows is not None and window + 1 == train.epochs * windows

    @property
    def eval_size(self) -> int:
        """Return the samples that one rank evaluates at once."""
        return self.train.eval_micro_size or self.batch.micro_size

    @property
    def schedule_steps(self) -> int | None:
        """Return the number of optimizer steps that the learning rate schedule spans."""
        return self.train.steps if self.schedule.steps is None else self.schedule.steps


def is_due(every: int | str | None, step: int, *, epoch_over: bool) -> bool:
    """Return whether what is due each ``every`` optimizer steps, or at the end of each epoch, is due after ``step``."""
    return epoch_over if isinstance(every, str) else bool(every) and step % every == 0


# place of a key in the plan where it is not GROUP.KEY
PLACES = {
    "task": "task.params",
    "batch.short_window": "epoch.short_window_policy",
    "run.calibrate_s": "train.calibrate_s",
    "optimizer.lr": "optimizer.base_lr",  # as configured, before lr_scaling
    "optimizer.betas": "optimizer.base_betas",
    "optimizer.eps": "optimizer.base_eps",
}


def part(plan: LaunchPlan, *affected: str) -> dict[str, Any]:
    """Return the values that ``plan`` has for config keys, as JSON values by dotted key; None where it has none.

    Args:
        affected: only of the keys that affect one of these: learning, time, memory, record. Default: all keys.
    """
    values: dict[str, Any] = {}
    for key, facts in facts_by_key().items():
        if affected and facts.affects.isdisjoint(affected):
            continue
        place, value = PLACES.get(key, key), cast("Any", plan)
        if key.partition(".")[0] in plan.added:
            value = SimpleNamespace(**{name: SimpleNamespace(**group) for name, group in plan.added.items()})
        for name in place.split("."):
            value = getattr(value, {"_target_": "target", "*": "arguments"}.get(name, name), None)
        group = key.removesuffix(".*")
        if key in ("task", f"{group}.*"):
            values |= {f"{group}.{name}": each for name, each in cast("dict[str, Any]", value or {}).items()}
        else:
            values[key] = value
        if key == "task" and isinstance(plan, RunPlan):
            values["task._target_"] = plan.task.target
    return json.loads(json.dumps(values, default=str))
