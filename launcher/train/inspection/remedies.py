"""Settings with which a job fits into memory that does not fit as configured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from launcher.config.schema import Compress, Norm, Recompute, StrategyKind, Sync
from launcher.plan.memory_limit import excess_bytes
from launcher.plan.run_plan import Forecast, RunPlan, StrategyPlan
from launcher.plan.strategy import CONFIGURED
from launcher.plan.sync_policy import SHARDED

LIMIT_S = 10.0  # of CPU time, after which no further combination is tried

Change = tuple[str, Callable[[RunPlan], RunPlan]]  # settings, and what they do to a plan


def find_remedy(
    plan: RunPlan, memory_bytes: int, forecasts: Sequence[Forecast], trace: Callable[[RunPlan], Forecast]
) -> list[str] | None:
    """Return the fewest settings with which a job fits that does not, at the same global batch: all that this job can
    change if the search for fewer takes too long; empty if these do not suffice; None if that is not known.

    Args:
        forecasts: those of the plan.
        trace: returns the forecast of a plan under the policy that it names.
    """
    strategy = plan.strategy
    usable = _usable(plan, forecasts)
    until = time.process_time() + LIMIT_S

    def needed(changes: Sequence[Change]) -> int | None:
        """Return the reserved bytes after ``changes``; None if they exceed the memory, or are not known."""
        forecast = trace(_changed(plan, changes))
        return None if excess_bytes(forecast, memory_bytes) else forecast.reserved_bytes

    def named(changes: Sequence[Change]) -> list[str]:
        return [*(setting for setting, _ in changes), *_policy(plan, _changed(plan, changes))]

    everything = _settings(plan)
    if not everything:
        return []
    least_of_all = trace(_changed(plan, everything))
    if least_of_all.reserved_bytes is None:
        return None
    if excess_bytes(least_of_all, memory_bytes):
        return []
    for changes in _combinations(everything):
        if time.process_time() > until:
            break
        if (least := needed(changes)) is None:
            continue
        if [setting for setting, _ in changes] == [_micro(plan, 1)[0]]:
            before = max(each.reserved_bytes or 0 for each in usable if each.sync is strategy.sync)
            more = _largest_micro(plan, least, before, memory_bytes)
            changes = (more,) if needed((more,)) is not None else changes
        return named(changes)
    return named(everything)


def fits(plan: RunPlan, memory_bytes: int, forecasts: Sequence[Forecast]) -> bool:
    """Return whether a job fits as it is, as far as that is predicted."""
    return any(each.reserved_bytes is None or not excess_bytes(each, memory_bytes) for each in _usable(plan, forecasts))


def _usable(plan: RunPlan, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the forecasts of the policies that the job may have."""
    return [each for each in forecasts if each.sync is plan.strategy.sync or _chooses(plan)]


def _changed(plan: RunPlan, changes: Sequence[Change]) -> RunPlan:
    """Return ``plan`` with ``changes``, under the policy that then holds least."""
    for _, change in changes:
        plan = change(plan)
    # gradients are sharded as soon as they exist
    sync = Sync.every if plan.strategy.kind in SHARDED else plan.strategy.sync
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, sync=sync))


def _chooses(plan: RunPlan) -> bool:
    """Return whether the launcher chooses the sync policy."""
    return plan.strategy.sync_reason != CONFIGURED


def _policy(plan: RunPlan, changed: RunPlan) -> list[str]:
    """Return the setting of the policy, if the user has chosen another one."""
    same = _chooses(plan) or plan.strategy.sync is changed.strategy.sync
    return [] if same else [f"strategy.sync={changed.strategy.sync.value}"]


def _settings(plan: RunPlan) -> list[Change]:
    """Return the settings that this job can change."""
    batch = plan.batch
    even = batch.micro_size * batch.accumulation * batch.world_size == batch.global_size
    smaller = [_micro(plan, 1)] if batch.micro_size > 1 and even else []
    return [*smaller, *_recompute(plan), *_sharding(plan)]


def _combinations(settings: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Yield the combinations of some of ``settings``, those of the fewest first."""
    for number in range(1, max(2, len(settings))):
        yield from itertools.combinations(settings, number)


def _micro(plan: RunPlan, size: int) -> Change:
    accumulation = plan.batch.accumulation * plan.batch.micro_size // size

    def change(plan: RunPlan) -> RunPlan:
        batch = dataclasses.replace(plan.batch, micro_size=size, accumulation=accumulation)
        return dataclasses.replace(plan, batch=batch)

    return f"batch.micro_size={size} batch.accumulation={accumulation}", change


def _largest_micro(plan: RunPlan, least: int, before: int, memory_bytes: int) -> Change:
    """Return the largest micro-batch that fits if memory grows linearly with it.

    Args:
        least, before: bytes needed with micro-batches of one sample, and with those of the plan.
    """
    now = plan.batch.micro_size
    most = 1 + (memory_bytes - least) * (now - 1) / max(1, before - least)
    return _micro(plan, max(size for size in range(1, now) if now % size == 0 and size <= max(1, most)))


def _recompute(plan: RunPlan) -> list[Change]:
    if plan.strategy.recompute is not Recompute.none or not plan.task.unit_parameters or plan.batch.norm is Norm.window:
        return []

    def change(plan: RunPlan) -> RunPlan:
        return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, recompute=Recompute.blocks))

    return [("strategy.recompute=blocks", change)]


def _sharding(plan: RunPlan) -> list[Change]:
    """Return sharding over all ranks. It has no effect, or refuses an option of DDP, for some plans."""
    strategy, world = plan.strategy, plan.batch.world_size
    of_ddp = strategy.compress is not Compress.none
    options = strategy.static_graph or strategy.find_unused_parameters or of_ddp
    if world == 1 or strategy.kind is StrategyKind.fsdp or options or strategy.bucket_mb != StrategyPlan.bucket_mb:
        return []

    def change(plan: RunPlan) -> RunPlan:
        changed = dataclasses.replace(plan.strategy, kind=StrategyKind.fsdp, shard_size=world)
        return dataclasses.replace(plan, strategy=changed)

    sized = strategy.kind is StrategyKind.hsdp and strategy.shard_size != plan.cluster.workers_per_node
    return [("strategy=fsdp strategy.shard_size=null" if sized else "strategy=fsdp", change)]
