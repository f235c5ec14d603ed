"""Ranking of the plans of one global batch: by step time and by GPU-hours, with the frontier between the two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError
from launcher.plan.forecast import StepTime
from launcher.plan.memory_limit import excess_bytes
from launcher.plan.run_forecast import RunForecast
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.work import OTHERS_BUSY
from launcher.quantities import first_names

_SHOWN_VALUES = 6


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
    def step(self) -> StepTime | None:
        return None if self.forecast is None else self.forecast.step

    @property
    def ranks(self) -> int:
        return self.plan.batch.world_size

    @functools.cached_property
    def run(self) -> RunForecast | None:
        """Forecast of the whole run; None if its step time is not predicted."""
        return RunForecast.of(self.plan)

    @property
    def hours(self) -> float | None:
        """Hours to the end of the run; None if they are not predicted, or if the run's length is unknown."""
        return None if self.run is None or self.run.total_s is None else self.run.total_s / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.run is None else self.run.gpu_hours

    @property
    def cost(self) -> float | None:
        """Price of the run; None without ``cluster.price_per_gpu_hour``."""
        return None if self.run is None else self.run.cost

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the predicted peak exceeds a rank's usable memory; 0 if it fits or is unknown."""
        memory = self.plan.strategy.memory_bytes
        return 0 if self.forecast is None or memory is None else excess_bytes(self.forecast, memory)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Ranked candidates, and those that cannot be ranked.

    Attributes:
        by_time: candidates that are not known to exceed the memory, the fastest first.
        by_gpu_time: the same, that of the fewest GPU-hours first.
        frontier: those than which no other is both faster and cheaper, the fastest first.
        untimed: candidates without a predicted step time, in the order of the request.
        too_large: candidates that need more memory than there is, the least excess first.
        impossible: labels of the settings that have no plan, by reason.
        notes: notes that all plans share, and which cells were measured on a busy machine.
    """

    by_time: tuple[Candidate, ...]
    by_gpu_time: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    untimed: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    impossible: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]

    @property
    def fastest(self) -> tuple[Candidate, ...]:
        """Return the candidates that cannot be told apart from the fastest: their intervals of step time overlap."""
        return overlapping(self.by_time, lambda _: 1.0)

    @property
    def cheapest(self) -> tuple[Candidate, ...]:
        """Return the candidates that cannot be told apart from that of the fewest GPU-hours."""
        return overlapping(self.by_gpu_time, lambda candidate: candidate.ranks)


def require_equal_work(plans: Sequence[RunPlan]) -> None:
    """Check that the plans can be ranked by the times of their steps, before any of these is known.

    Raises:
        ConfigError: they differ in the global batch or in the number of steps.
    """
    sizes = sorted({plan.batch.global_size for plan in plans})
    if len(sizes) > 1:
        raise ConfigError(
            "batch.global_size", first_names([str(size) for size in sizes], _SHOWN_VALUES),
            "differs between the cells, so that the times of their steps do not compare.",
            "Set batch.global_size=N, and leave out batch.micro_size or batch.accumulation, which then follows.",
        )  # fmt: skip
    lengths = sorted({plan.train.steps or 0 for plan in plans})
    if len(lengths) > 1:
        raise ConfigError(
            "train.steps", first_names([str(steps) for steps in lengths], _SHOWN_VALUES),
            "differs between the cells, so that their GPU-hours do not compare.", "Do not vary the length of the run.",
        )  # fmt: skip


def rank(candidates: Sequence[Candidate], refused: Iterable[tuple[str, str]] = ()) -> Ranking:
    """Return the ranking of ``candidates``.

    Args:
        candidates: plans that do the same work, see ``require_equal_work``.
        refused: (label, reason) of the settings that have no plan.
    """
    fitting = [candidate for candidate in candidates if not candidate.missing_bytes]
    timed = [candidate for candidate in fitting if candidate.step is not None]
    too_large = [candidate for candidate in candidates if candidate.missing_bytes]
    by_time = sorted(timed, key=lambda each: (_step_s(each), _gpu_s(each)))
    impossible: dict[str, list[str]] = {}
    for label, reason in refused:
        impossible.setdefault(reason, []).append(label)
    shared = [note for note in candidates[0].plan.notes if all(note in each.plan.notes for each in candidates)]
    if (busy := _busy_note(timed)) is not None:
        shared = [note for note in shared if not note.startswith(OTHERS_BUSY)] + [busy]
    return Ranking(
        by_time=tuple(by_time),
        by_gpu_time=tuple(sorted(timed, key=lambda each: (_gpu_s(each), _step_s(each)))),
        frontier=tuple(frontier(by_time)),
        untimed=tuple(candidate for candidate in fitting if candidate.step is None),
        too_large=tuple(sorted(too_large, key=lambda each: each.missing_bytes)),
        impossible=impossible,
        notes=tuple(shared),
    )


def _busy_note(timed: Sequence[Candidate]) -> str | None:
    """Return the note on the cells that were measured while other processes used this machine; None without one."""
    busy = [candidate.label for candidate in timed if candidate.step is not None and candidate.step.busy]
    if not busy:
        return None
    which = "all cells" if len(busy) == len(timed) else first_names(busy, _SHOWN_VALUES)
    return f"{OTHERS_BUSY} this machine while the steps of {which} were measured: they are those of a busy machine."


def frontier(by_time: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates than which no other is at least as fast and as cheap, and better in one of the two.

    Args:
        by_time: sorted by step time, and of equal ones by GPU-hours.
    """
    kept: list[Candidate] = []
    for candidate in by_time:
        time_s, cost_s = _step_s(candidate), _gpu_s(candidate)
        equal = bool(kept) and (time_s, cost_s) == (_step_s(kept[-1]), _gpu_s(kept[-1]))
        if not kept or equal or cost_s < _gpu_s(kept[-1]):
            kept.append(candidate)
    return kept


def overlapping(best_first: Sequence[Candidate], factor: Callable[[Candidate], float]) -> tuple[Candidate, ...]:
    """Return the candidates whose interval, ``factor`` times that of their step, overlaps with the first one's."""
    if not best_first:
        return ()
    first = best_first[0]
    limit = factor(first) * _step(first).high_s
    return (first, *(each for each in best_first[1:] if factor(each) * _step(each).low_s <= limit))


def _step(candidate: Candidate) -> StepTime:
    if candidate.step is None:
        raise ValueError(f"{candidate.label}: has no step time")
    return candidate.step


def _step_s(candidate: Candidate) -> float:
    return _step(candidate).step_s


def _gpu_s(candidate: Candidate) -> float:
    """Return the GPU-seconds of a step."""
    return _step_s(candidate) * candidate.ranks
