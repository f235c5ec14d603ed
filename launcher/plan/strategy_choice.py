"""Choice of a strategy for strategy=auto: the simplest one that fits into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from launcher.config.schema import Config, StrategyKind
from launcher.errors import UserError
from launcher.plan.ranking import SIMPLEST_FIRST, Candidate
from launcher.plan.run_plan import RunPlan
from launcher.quantities import bytes_text

_OF_ANOTHER = "has no effect with strategy="  # an option that belongs to another strategy
ONE_RANK = "the job has one rank"
UNKNOWN = "the simplest one, because the memory that it needs is not known"


def with_strategy(config: Config, kind: StrategyKind) -> Config:
    """Return ``config`` with this strategy."""
    return dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, kind=kind))


def with_each_strategy(config: Config) -> list[Config]:
    """Return ``config`` with each strategy among which strategy=auto chooses, the simplest first. One rank is single
    and has no choice. DDP sends as many bytes as FSDP and HSDP with gather_once, and fewer than their other policies.
    """
    return [with_strategy(config, kind) for kind in SIMPLEST_FIRST if kind is not StrategyKind.single]


def choose_strategy(config: Config, plan_of: Callable[[Config], RunPlan]) -> RunPlan:
    """Return the plan of the simplest strategy that fits, with the reason. No further one is tried after it.

    Args:
        config: has strategy=auto.
        plan_of: returns the plan of a config with one strategy, with predicted memory.

    Raises:
        UserError: no strategy is possible.
    """
    plans: list[RunPlan] = []
    errors: list[UserError] = []
    for each in with_each_strategy(config):
        try:
            plan = plan_of(each)
        except UserError as error:
            errors.append(error)
            continue
        if plan.batch.world_size == 1 and plan.cluster.range.fixed:
            return with_reason(plan_of(with_strategy(config, StrategyKind.single)), ONE_RANK)
        plans.append(plan)
        if not Candidate("", plan).missing_bytes:
            break
    if not plans:
        raise next((error for error in errors if _OF_ANOTHER not in str(error)), errors[0])
    return best_strategy(plans)


def best_strategy(plans: Sequence[RunPlan]) -> RunPlan:
    """Return the best of the plans of one job, with the reason.

    Args:
        plans: one for each strategy, the simplest first.
    """
    candidates = [Candidate(plan.strategy.kind.value, plan) for plan in plans]
    fitting = [each for each in candidates if not each.missing_bytes]
    if not fitting:
        least = min(candidates, key=lambda each: each.missing_bytes)
        text = bytes_text(least.missing_bytes)
        return with_reason(least.plan, f"least memory: no strategy is predicted to fit, and {least.label} lacks {text}")
    return with_reason(fitting[0].plan, _simplest(candidates, fitting[0]))


def with_reason(plan: RunPlan, reason: str) -> RunPlan:
    """Return ``plan`` with the reason for its strategy."""
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind_reason=reason))


def _simplest(candidates: Sequence[Candidate], chosen: Candidate) -> str:
    known = chosen.forecast is not None and None not in (chosen.forecast.peak_bytes, chosen.plan.strategy.memory_bytes)
    return f"the simplest one that is predicted to fit into memory{_lacking(candidates)}" if known else UNKNOWN


def _lacking(candidates: Sequence[Candidate]) -> str:
    lacking = [each for each in candidates if each.missing_bytes]
    return "".join(f"; {each.label} lacks {bytes_text(each.missing_bytes)}" for each in lacking)
