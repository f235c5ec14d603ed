"""What a page says first: a few sentences, each of them computed from finished runs, none that was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.interval import NO_INTERVAL
from launcher.report.comparison.compare import Row, TaskGroup


@dataclass(frozen=True)
class Headline:
    """``figure``: large; ``words``: what it is."""

    figure: str
    words: str


def headlines(group: TaskGroup) -> list[Headline]:
    """At most four; none where no run has finished."""
    done = [row for row in group.rows if row.done]
    found = [_fastest(done, group), _scaling(done, group), _saved(done, group), _cheapest(done, group)]
    return [each for each in found if each is not None]


def _fastest(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    fast = [row for row in rows if row.samples_per_s]
    if not fast:
        return None
    best = max(fast, key=lambda row: row.samples_per_s or 0.0)
    assert best.facts is not None
    who = _count(best.facts.world_size, "GPU" if group.hours == "GPU-hours" else "worker")
    which = f"the fastest of {len(fast)} finished runs: {group.said(best)}" if len(fast) > 1 else group.said(best)
    return Headline(f"{best.samples_per_s:,.4g} samples/s", f"on {who}: {which}.")


def _scaling(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    """From the fewest workers to the most that were compared with them."""
    compared = [row for row in rows if row.efficiency and row.facts and row.facts.world_size > row.efficiency.baseline]
    if not compared:
        return None
    most = max(row.facts.world_size for row in compared if row.facts)
    there = [(row.efficiency, row) for row in compared if row.efficiency and row.facts and row.facts.world_size == most]
    baseline = min(efficiency.baseline for efficiency, _ in there)
    values = [efficiency.value for efficiency, _ in there if efficiency.baseline == baseline]
    gains = [value * most / baseline for value in values]
    gained = _span(f"{min(gains):.2f}×", f"{max(gains):.2f}×")
    span = _span(f"{min(values):.0%}", f"{max(values):.0%}")
    over = "" if len(gains) == 1 else f", over {len(gains)} settings"
    who = "GPUs" if group.hours == "GPU-hours" else "workers"
    return Headline(f"{gained} the speed", f"from {baseline} to {most} {who}: {span} scaling efficiency{over}.")


def _saved(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    saving = [(saved, row.measured, row) for row in rows if (saved := row.saved_fraction) and row.measured]
    if not saving:
        return None
    saved, measured, best = max(saving, key=lambda found: (found[0], found[1].claimed_speedup or 0.0))
    assert best.facts is not None
    speedup = measured.claimed_speedup
    if speedup is not None:
        gain = f", and a step ran {speedup:.2f}× as fast"
    elif measured.speedup_95 is not None:
        gain = "; no difference in speed was measured"
    elif measured.speedup is not None:
        gain = f"; the speed-up was {NO_INTERVAL}"
    else:
        gain = "; what this gained was not measured"
    return Headline(
        f"{saved:.1%} fewer bytes",
        f"on the wire with accumulation {best.facts.accumulation} than if every micro-batch were synchronised{gain} "
        f"({group.said(best)}).",
    )


def _cheapest(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    there = [(row.hours, row) for row in rows if row.hours]
    if group.loss is None or len(there) < 2:
        return None
    (least, best), (most, worst) = min(there, key=lambda pair: pair[0]), max(there, key=lambda pair: pair[0])
    unit, times = group.time_unit
    return Headline(
        f"{least * times:.3g} {unit}",
        f"to a training loss of {group.loss:.4g} is the least: {group.said(best)}. The most was "
        f"{most / least:.2f} times that: {group.said(worst)}.",
    )


def _span(lowest: str, highest: str) -> str:
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
