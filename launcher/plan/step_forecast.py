"""Forecast of a step's time: from the timeline of a window, the work of the device, and the links between ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from launcher.config.schema import Device, Sync
from launcher.plan.forecast import StepTime
from launcher.plan.links import Links
from launcher.plan.replay import ReplayedWindow, Span, Timeline, replay
from launcher.plan.roofline import ROOFLINE_ERROR
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.sync_policy import Collective, transfers_per_window
from launcher.plan.work import Seconds, Work


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Facts from the trace of a task that determine the time of its windows.

    Attributes:
        spans: timeline of each policy whose window ran, with seconds of the GPU in the table.
        on_gpu: whether that is the plan's device; if not, only the proportions of the seconds count.
        peak_flops: peak FLOP/s of the device in the job's precision; None if unknown.
        items_per_sample: items that the loss is averaged over; None if their number depends on the data.
        flops_per_sample: model FLOPs, forward and backward; None if unknown.
    """

    spans: dict[Sync, Sequence[Span]]
    on_gpu: bool
    peak_flops: float | None
    items_per_sample: float | None
    flops_per_sample: float | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        spans: dict[str, Sequence[Span]] = fields["spans"]
        others = {name: value for name, value in fields.items() if name != "spans"}
        return cls(spans={Sync(name): each for name, each in spans.items()}, **others)


def with_steps(
    plan: RunPlan, forecasts: Sequence[Forecast], trace: Trace | None, links: Links | None, work: Work | None
) -> list[Forecast]:
    """Return the forecasts with the time of a step under their policies, as far as it is known."""
    return [dataclasses.replace(each, step=step_time(plan, each.sync, trace, links, work)) for each in forecasts]


def step_time(
    plan: RunPlan, sync: Sync, trace: Trace | None, links: Links | None, work: Work | None
) -> StepTime | None:
    """Return the time of a step under a sync policy; None if a part of it is unknown.

    Whole windows that were measured on the only host of a job contain their collectives. Otherwise computation, as
    measured on one host or from the roofline, is replayed with the collectives of the trace.

    Args:
        trace: None if the task cannot be traced.
        links: None if the rates of the links are unknown, or if there is one rank.
        work: measured on this machine; None if it was not.
    """
    spans = None if trace is None else trace.spans.get(sync)
    whole = None if work is None else work.of_window(sync, plan.batch.accumulation)
    timeline = None if spans is None else Timeline.of(spans)
    known = timeline is not None and (links is not None or not any(payload for _, _, payload in spans or ()))
    if work is not None and whole is not None and plan.cluster.nodes == 1:
        window = _replayed(plan, sync, timeline, links)[0] if timeline is not None and known else None
        step = _measured(plan, whole, work, window)
    elif timeline is None or not known:
        return None
    elif work is not None and whole is not None:
        step = _replayed_work(plan, sync, timeline, links, work, whole)
    elif trace is not None and trace.on_gpu:
        window, half = _replayed(plan, sync, timeline, links)
        step = _step(window, half, "roofline")
    else:
        return None
    if plan.batch.world_size == 1:
        step = dataclasses.replace(step, data_s=step.data_s + step.exposed_s, communication_s=0.0, exposed_s=0.0)
    if trace is None:
        return step
    samples, ranks = plan.batch.global_size, plan.cluster.world_size
    return dataclasses.replace(
        step,
        items=None if trace.items_per_sample is None else samples * trace.items_per_sample,
        flops=None if trace.flops_per_sample is None else samples * trace.flops_per_sample,
        peak_flops=None if trace.peak_flops is None else ranks * trace.peak_flops,
    )


def _measured(plan: RunPlan, whole: Seconds, work: Work, window: ReplayedWindow | None) -> StepTime:
    """Return the time of a window that was measured with its collectives."""
    compute, others = _parts_of(plan, work)
    exposed = max(0.0, whole.value - compute - work.optimizer.value - others)
    return StepTime(
        step_s=whole.value,
        low_s=_low(whole.value, whole.error * whole.value),
        high_s=whole.value * (1 + whole.error),
        compute_s=compute,
        optimizer_s=work.optimizer.value,
        data_s=others,
        communication_s=exposed if window is None else max(exposed, window.communication_s),
        exposed_s=exposed,
        source="measured",
        busy=work.busy,
    )


def _parts_of(plan: RunPlan, work: Work) -> tuple[float, float]:
    """Return the time of a window in its passes, and in everything besides passes, optimizer step and collectives."""
    kind = plan.strategy.kind
    steady = (sync for sync in work.windows if len({transfers_per_window(kind, sync, size) for size in (1, 2)}) == 1)
    return work.of_parts(next(steady, None), plan.batch.accumulation)


def _replayed_work(
    plan: RunPlan, sync: Sync, timeline: Timeline, links: Links | None, work: Work, silent: Seconds
) -> StepTime:
    """Return the time of a window on several hosts, from its computation as measured on one.

    Args:
        silent: time of the window without collectives.
    """
    forward, backward = timeline.passes_s()
    compute = plan.batch.accumulation * (work.forward.value + work.backward.value)
    _, data = _parts_of(plan, work)
    stretched = (
        max(silent.value - work.optimizer.value - data, 0.0) / compute
    )  # copies into and out of the buffers of collectives
    timeline = timeline.scaled(
        stretched * work.forward.value / forward, stretched * work.backward.value / backward,
        work.optimizer.value / timeline.optimizer_s if timeline.optimizer_s else 0.0,
    )  # fmt: skip
    window, half = _replayed(plan, sync, timeline, links, silent.error, work.optimizer.error)
    step = _step(window, math.hypot(half, work.window.error * data), "measured")
    if plan.cluster.device is Device.cpu:
        step = _without_overlap(step, silent.error, 0.0 if links is None else links.error(plan.cluster.nodes))
    return dataclasses.replace(
        step, step_s=step.step_s + data, low_s=step.low_s + data, high_s=step.high_s + data, data_s=data,
        busy=work.busy,
    )  # fmt: skip


def _without_overlap(step: StepTime, own_error: float, link_error: float) -> StepTime:
    """Return the step of CPU ranks on several hosts. Their collectives need the cores that compute, and hide nothing;
    the interval begins where they hide what they would on a GPU."""
    own = step.compute_s + step.optimizer_s
    value = max(step.step_s, own + step.communication_s)
    half = math.hypot(own * own_error, step.communication_s * link_error)
    high, exposed = max(step.high_s, value + half), step.communication_s
    return dataclasses.replace(step, step_s=value, high_s=high, exposed_s=max(step.exposed_s, exposed))


def _step(window: ReplayedWindow, half: float, source: str) -> StepTime:
    return StepTime(
        step_s=window.step_s,
        low_s=_low(window.step_s, half),
        high_s=window.step_s + half,
        compute_s=window.compute_s,
        optimizer_s=window.optimizer_s,
        data_s=0.0,
        communication_s=window.communication_s,
        exposed_s=max(0.0, window.step_s - window.compute_s - window.optimizer_s),
        source=source,
    )


def _low(value: float, half: float) -> float:
    """Return the lower end of an interval around ``value`` that ends ``half`` above it: as many times below it as the
    upper end is above. It is never 0, as no step takes no time."""
    return value * value / (value + half) if value else 0.0


def _replayed(
    plan: RunPlan,
    sync: Sync,
    timeline: Timeline,
    links: Links | None,
    compute_error: float = ROOFLINE_ERROR,
    optimizer_error: float = ROOFLINE_ERROR,
) -> tuple[ReplayedWindow, float]:
    """Return the replayed window, and the half width of its interval: what each part's error changes, as independent
    errors."""
    groups = _Groups.of(plan)

    def result(compute: float = 1.0, optimizer: float = 1.0, communication: float = 1.0) -> ReplayedWindow:
        def cost(kind: Collective, payload: int) -> float:
            return 0.0 if links is None else communication * groups.seconds(links, kind, payload)

        return replay(plan, sync, timeline.scaled(compute, compute, optimizer), cost)

    base = result()
    link_error = 0.0 if links is None else links.error(plan.cluster.nodes)
    others = (
        result(compute=1 + compute_error),
        result(optimizer=1 + optimizer_error),
        result(communication=1 + link_error),
    )
    return base, math.hypot(*(other.step_s - base.step_s for other in others))


@dataclass(frozen=True)
class _Groups:
    """Groups of ranks that communicate.

    Attributes:
        world, shards, replicas: (ranks of a group, hosts over which they are spread, groups on a host).
    """

    world: tuple[int, int, int]
    shards: tuple[int, int, int]
    replicas: tuple[int, int, int]

    @classmethod
    def of(cls, plan: RunPlan) -> _Groups:
        cluster, size = plan.cluster, plan.strategy.shard_size
        world, workers = cluster.world_size, cluster.workers_per_node
        shards = size, math.ceil(size / workers), max(1, workers // size)
        replicas = world // size, min(cluster.nodes, world // size), min(workers, size)
        return cls((world, cluster.nodes, 1), shards, replicas)

    def seconds(self, links: Links, kind: Collective, payload: int) -> float:
        if kind is Collective.all_reduce:
            ranks, hosts, groups = self.replicas
        elif kind in (Collective.all_gather, Collective.reduce_scatter):
            ranks, hosts, groups = self.shards
        else:
            ranks, hosts, groups = self.world
        return links.seconds(kind, payload, ranks=ranks, hosts=hosts, groups=groups)
