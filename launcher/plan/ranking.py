"""Ranking of the plans of one global batch: by what fits into memory, wire bytes, and simplicity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.config.schema import StrategyKind
from launcher.errors import ConfigError
from launcher.plan.memory_limit import excess_bytes
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.sync_policy import POLICIES
from launcher.quantities import first_names

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
    """Ranked candidates, and those that cannot be ranked.

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


def require_equal_work(plans: Sequence[RunPlan]) -> None:
    """Check that the plans can be ranked by the bytes of their steps.

    Raises:
        ConfigError: they differ in the global batch.
    """
    sizes = sorted({plan.batch.global_size for plan in plans})
    if len(sizes) > 1:
        raise ConfigError(
            "batch.global_size", first_names([str(size) for size in sizes], _SHOWN_VALUES),
            "differs between the cells, so that their steps do not compare.",
            "Set batch.global_size=N, and leave out batch.micro_size or batch.accumulation, which then follows.",
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
