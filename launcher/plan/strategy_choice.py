"""Choice of a strategy for strategy=auto: the fastest one that fits, or the simplest one where times are unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from launcher.config.schema import Config, StrategyKind
from launcher.errors import UserError
from launcher.plan.ranking import Candidate, overlapping
from launcher.plan.run_plan import RunPlan
from launcher.quantities import bytes_text, seconds_text

# the simplest first; one rank has no other strategy than single
_SIMPLEST_FIRST = (StrategyKind.ddp, StrategyKind.fsdp, StrategyKind.hsdp)
_OF_ANOTHER = "has no effect with strategy="  # an option that belongs to another strategy
ONE_RANK = "the job has one rank"
UNKNOWN = "the simplest one, because the memory that it needs is not known"


def with_strategy(config: Config, kind: StrategyKind) -> Config:
    """Return ``config`` with this strategy."""
    return dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, kind=kind))


def with_each_strategy(config: Config) -> list[Config]:
    """Return ``config`` with each strategy among which strategy=auto chooses."""
    return [with_strategy(config, kind) for kind in _SIMPLEST_FIRST]


def choose_strategy(config: Config, plan_of: Callable[[Config], RunPlan], *, timed: bool) -> RunPlan:
    """Return the plan of the best strategy, with the reason.

    Args:
        config: has strategy=auto.
        plan_of: returns the plan of a config with one strategy, with predicted memory.
        timed: whether plans are timed. If not, a plan has a time only if an earlier one was timed, and no further
            strategy is tried after one that fits and has no time.

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
        candidate = Candidate("", plan)
        if not timed and candidate.step is None and not candidate.missing_bytes:
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
    timed = sorted((each.step.step_s, number) for number, each in enumerate(fitting) if each.step is not None)
    if len(timed) < len(fitting):
        return with_reason(fitting[0].plan, _simplest(candidates, fitting[0]))
    by_time = [fitting[number] for _, number in timed]
    alike = overlapping(by_time, lambda _: 1.0)
    chosen = next(each for each in fitting if each in alike)
    times = {each: seconds_text(seconds) for each, (seconds, _) in zip(by_time, timed, strict=True)}
    if len(alike) > 1:
        names = " and ".join(f"{each.label} ({times[each]})" for each in fitting if each in alike)
        return with_reason(chosen.plan, f"the simplest of {names}, whose predicted step times cannot be told apart")
    if len(by_time) == 1:
        only = "is predicted to fit into memory" if len(candidates) > 1 else "is possible"
        return with_reason(chosen.plan, f"the only one that {only}{_lacking(candidates)}")
    others = ", ".join(f"{each.label} {times[each]}" for each in by_time[1:])
    return with_reason(chosen.plan, f"fastest predicted step, {times[chosen]}; {others}{_lacking(candidates)}")


def with_reason(plan: RunPlan, reason: str) -> RunPlan:
    """Return ``plan`` with the reason for its strategy."""
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind_reason=reason))


def _simplest(candidates: Sequence[Candidate], chosen: Candidate) -> str:
    known = chosen.forecast is not None and None not in (chosen.forecast.peak_bytes, chosen.plan.strategy.memory_bytes)
    return f"the simplest one that is predicted to fit into memory{_lacking(candidates)}" if known else UNKNOWN


def _lacking(candidates: Sequence[Candidate]) -> str:
    lacking = [each for each in candidates if each.missing_bytes]
    return "".join(f"; {each.label} lacks {bytes_text(each.missing_bytes)}" for each in lacking)
