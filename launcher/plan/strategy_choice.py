"""Choice of a strategy for strategy=auto: the simplest one that fits into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.config.schema import Config, StrategyKind
from launcher.errors import ConfigError, UserError
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.strategy import excess_bytes
from launcher.plan.sync_policy import POLICIES
from launcher.quantities import bytes_text, first_names

_SHOWN_VALUES = 6
SIMPLEST_FIRST = (StrategyKind.single, StrategyKind.ddp, StrategyKind.fsdp, StrategyKind.hsdp)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One of several plans of the same job.

    Attributes:
        label: the settings in which it differs from the others.
    """

    label: str
    plan: RunPlan

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the plan's sync policy."""
        return self.plan.strategy.forecast

    @property
    def wire_bytes(self) -> int | None:
        """Bytes that a rank sends in a step; 0 for one rank, None if they are not known."""
        return 0 if self.plan.batch.world_size == 1 else self.forecast and self.forecast.wire_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the predicted peak exceeds a rank's usable memory; 0 if it fits or is unknown."""
        memory = self.plan.strategy.memory_bytes
        return 0 if self.forecast is None or memory is None else excess_bytes(self.forecast, memory)

    @property
    def place(self) -> tuple[float, int, int, int]:
        """Sort key: the fewest wire bytes first (unknown ones last), then the simplest strategy and sync policy, then
        the fewest micro-batches."""
        kind, sync = self.plan.strategy.kind, self.plan.strategy.sync
        sent = float("inf") if self.wire_bytes is None else self.wire_bytes
        return sent, SIMPLEST_FIRST.index(kind), POLICIES[kind].index(sync), self.plan.batch.accumulation


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Ranked candidates, and settings that cannot be ranked.

    Attributes:
        fitting: candidates that are not known to exceed the memory, the best first.
        too_large: candidates that need more memory than there is, the least excess first.
        impossible: labels of the settings that have no plan, by reason.
        notes: notes that all plans share.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    impossible: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]


def require_equal_work(global_sizes: Iterable[int], key: str = "batch.global_size") -> None:
    """Check that plans with these global batches, values of ``key``, can be ranked by the bytes of their steps.

    Raises:
        ConfigError: they differ.
    """
    sizes = sorted({*global_sizes})
    if len(sizes) > 1:
        raise ConfigError(
            key, first_names([str(size) for size in sizes], _SHOWN_VALUES),
            "differs between the cells, so that their steps do not compare.",
            f"Set {key}=N, and leave out batch.micro_size or batch.accumulation, which then follows.",
        )  # fmt: skip


def rank(candidates: Sequence[Candidate], refused: Iterable[tuple[str, str]] = ()) -> Ranking:
    """Return the ranking of ``candidates``.

    Args:
        candidates: plans that do the same work, see ``require_equal_work``.
        refused: (label, reason) of the settings that have no plan.
    """
    impossible: dict[str, list[str]] = {}
    for label, reason in refused:
        impossible.setdefault(reason, []).append(label)
    shared = [note for note in candidates[0].plan.notes if all(note in each.plan.notes for each in candidates)]
    return Ranking(
        fitting=tuple(sorted((each for each in candidates if not each.missing_bytes), key=lambda each: each.place)),
        too_large=tuple(
            sorted((each for each in candidates if each.missing_bytes), key=lambda each: each.missing_bytes)
        ),
        impossible=impossible,
        notes=tuple(shared),
    )


_OF_ANOTHER = "has no effect with strategy="  # an option that belongs to another strategy
ONE_RANK = "the job has one rank"
UNKNOWN = "the simplest one, because the memory that it needs is not known"


def with_strategy(config: Config, kind: StrategyKind) -> Config:
    """Return ``config`` with this strategy."""
    return dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, kind=kind))


def choose_strategy(config: Config, plan_of: Callable[[Config], RunPlan]) -> RunPlan:
    """Return the plan of the simplest strategy that fits, with the reason. No further one is tried after it.

    DDP sends as many bytes as FSDP and HSDP with gather_once, and fewer than their other policies.

    Args:
        config: has strategy=auto.
        plan_of: returns the plan of a config with one strategy, with predicted memory.

    Raises:
        UserError: no strategy is possible.
    """
    tried: list[Candidate] = []
    errors: list[UserError] = []
    for kind in SIMPLEST_FIRST[1:]:
        try:
            plan = plan_of(with_strategy(config, kind))
        except UserError as error:
            errors.append(error)
            continue
        if plan.batch.world_size == 1 and plan.cluster.range.fixed:
            return with_reason(plan_of(with_strategy(config, StrategyKind.single)), ONE_RANK)
        candidate = Candidate(kind.value, plan)
        if not candidate.missing_bytes:
            lacking = "".join(f"; {each.label} lacks {bytes_text(each.missing_bytes)}" for each in tried)
            unknown = candidate.forecast is None or candidate.forecast.peak_bytes is None
            if unknown or plan.strategy.memory_bytes is None:
                return with_reason(plan, UNKNOWN + lacking)
            return with_reason(plan, f"the simplest one that is predicted to fit into memory{lacking}")
        tried.append(candidate)
    if not tried:
        raise next((error for error in errors if _OF_ANOTHER not in str(error)), errors[0])
    least = min(tried, key=lambda each: each.missing_bytes)
    text = bytes_text(least.missing_bytes)
    return with_reason(least.plan, f"least memory: no strategy is predicted to fit, and {least.label} lacks {text}")


def with_reason(plan: RunPlan, reason: str) -> RunPlan:
    """Return ``plan`` with the reason for its strategy."""
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind_reason=reason))
