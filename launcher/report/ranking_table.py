"""Ranking of plans as text for the terminal and as JSON. The page has the same columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from launcher.config.schema import Device
from launcher.plan.ranking import Candidate, Ranking
from launcher.quantities import bytes_text, count, first_names

_SHOWN_LABELS = 6


@dataclass(frozen=True)
class RankingColumn:
    """Column of the ranking.

    Attributes:
        value: number of a candidate; None if it is unknown.
        text: that number as text.
    """

    heading: str
    unit: str
    value: Callable[[Candidate], float | None]
    text: Callable[[Candidate], str]

    @property
    def title(self) -> str:
        return f"{self.heading}, {self.unit}" if self.unit else self.heading


def gpu_hours_unit(ranking: Ranking) -> str:
    """Return what an hour of one rank is called."""
    on_gpus = any(each.plan.cluster.device is Device.cuda for each in all_candidates(ranking))
    return "GPU-hours" if on_gpus else "worker-hours"


def all_candidates(ranking: Ranking) -> Sequence[Candidate]:
    return (*ranking.by_time, *ranking.untimed, *ranking.too_large)


def ranked(ranking: Ranking) -> Sequence[Candidate]:
    """Return the candidates of the main table: those that are not known to exceed the memory."""
    return (*ranking.by_time, *ranking.untimed)


def columns(ranking: Ranking) -> list[RankingColumn]:
    """Return the columns with numbers, those that are empty for all candidates left out."""
    in_ms = bool(ranking.by_time) and _step_s(ranking.by_time[0]) < 1
    unit, factor = ("ms", 1e3) if in_ms else ("s", 1.0)
    gpu_place = {each: place for place, each in enumerate(ranking.by_gpu_time, 1)}

    def number(heading: str, value: Callable[[Candidate], float | None], form: str, unit: str = "") -> RankingColumn:
        def text(candidate: Candidate) -> str:
            found = value(candidate)
            return "" if found is None else format(found, form)

        return RankingColumn(heading, unit, value, text)

    def interval(candidate: Candidate) -> str:
        step = candidate.step
        return "" if step is None else f"{step.low_s * factor:,.4g}–{step.high_s * factor:,.4g}"

    def exposed(candidate: Candidate) -> float | None:
        return None if candidate.step is None else candidate.step.exposed_s * factor

    found = [
        number("ranks", lambda each: each.ranks, ",d"),
        number("acc.", lambda each: each.plan.batch.accumulation, ",d"),
        number("step", lambda each: None if each.step is None else each.step.step_s * factor, ",.4g", unit),
        RankingColumn("90%", unit, lambda each: None if each.step is None else each.step.high_s * factor, interval),
        number("exposed", exposed, ",.3g", unit),
        number("hours", lambda each: each.hours, ",.3g"),
        number(gpu_hours_unit(ranking), lambda each: each.gpu_hours, ",.4g"),
        number(f"# by {gpu_hours_unit(ranking)}", gpu_place.get, "d"),
        number("cost", lambda each: each.cost, ",.2f"),
        RankingColumn("memory", "", _peak_bytes, lambda each: _text_of_bytes(_peak_bytes(each))),
    ]
    return [column for column in found if any(column.value(each) is not None for each in all_candidates(ranking))]


def policy_text(candidate: Candidate) -> str:
    """Return strategy and sync policy of a candidate."""
    strategy = candidate.plan.strategy
    return f"{strategy.kind.value} {strategy.sync.value}"


def ranking_tables(ranking: Ranking) -> Iterator[Table | str]:
    """Yield what the terminal shows, in order: tables and lines of text."""
    shown = columns(ranking)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("cell", overflow="fold")
    table.add_column("strategy and sync", overflow="fold")
    for column in shown:
        table.add_column(column.title, justify="right", overflow="fold")
    if ranking.by_time:
        table.add_column("frontier")
    for place, each in enumerate(ranked(ranking), 1):
        number = "" if each.step is None else str(place)
        mark = ["*" if each in ranking.frontier else ""] if ranking.by_time else []
        table.add_row(number, escape(each.label), policy_text(each), *(column.text(each) for column in shown), *mark)
    if table.rows:
        yield table
    yield from sentences(ranking)
    if ranking.too_large:
        yield ""
        yield _too_large(ranking.too_large)
    if ranking.impossible:
        yield ""
        yield "Impossible:"
        for reason, labels in ranking.impossible.items():
            yield f"  {first_names(labels, _SHOWN_LABELS)}: {reason}"
    for note in ranking.notes:
        yield f"note: {note}"


def sentences(ranking: Ranking) -> Iterator[str]:
    """Yield which candidates lead, and which of them cannot be told apart."""
    unit = gpu_hours_unit(ranking)
    if ranking.by_time:
        yield _lead("Fastest", ranking.fastest, ranking.by_time)
        yield _lead(f"Fewest {unit}", ranking.cheapest, ranking.by_time)
        few = len(ranking.frontier) > 1
        yield (
            f"*: no other cell is both faster and takes fewer {unit}."
            if few
            else (f"*: no other cell is faster, and none takes fewer {unit}.")
        )
    if ranking.untimed:
        yield f"Without a predicted step time: {count(len(ranking.untimed), 'cell')}."


def _lead(title: str, alike: Sequence[Candidate], by_time: Sequence[Candidate]) -> str:
    places = sorted(by_time.index(each) + 1 for each in alike)
    first = f"{title}: #{by_time.index(alike[0]) + 1}, {alike[0].label}."
    if len(places) == 1:
        return first
    return f"{first} {_listed(places)} cannot be told apart: their intervals overlap."


def _listed(places: Sequence[int]) -> str:
    """Return ``#1, #2 and #4``; a run of three or more as ``#1 to #3``."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [
        part
        for run in runs
        for part in ([f"#{run[0]} to #{run[-1]}"] if len(run) > 2 else [f"#{place}" for place in run])
    ]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _too_large(candidates: Sequence[Candidate]) -> Table:
    table = Table(title="Do not fit into memory", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("cell", overflow="fold")
    table.add_column("strategy and sync", overflow="fold")
    for heading in ("needs", "too much", "memory of a rank"):
        table.add_column(heading, justify="right")
    for each in candidates:
        texts = map(_text_of_bytes, (_peak_bytes(each), each.missing_bytes, each.plan.strategy.memory_bytes))
        table.add_row(escape(each.label), policy_text(each), *texts)
    return table


def ranking_json(ranking: Ranking) -> str:
    """Return the ranking as JSON; seconds, hours and bytes; null for what is unknown."""
    fastest, cheapest = set(ranking.fastest), set(ranking.cheapest)

    def record(candidate: Candidate, fits: bool | None) -> dict[str, Any]:
        plan, step = candidate.plan, candidate.step
        return {
            "cell": candidate.label,
            "strategy": plan.strategy.kind.value,
            "sync": plan.strategy.sync.value,
            "sync_reason": plan.strategy.sync_reason,
            "nodes": plan.cluster.nodes,
            "ranks": candidate.ranks,
            "micro_size": plan.batch.micro_size,
            "accumulation": plan.batch.accumulation,
            "step": None if step is None else asdict(step),
            "hours": candidate.hours,
            "gpu_hours": candidate.gpu_hours,
            "cost": candidate.cost,
            "peak_bytes": _peak_bytes(candidate),
            "memory_bytes": plan.strategy.memory_bytes,
            "missing_bytes": candidate.missing_bytes,
            "fits": fits,
            "wire_bytes": plan.strategy.wire_bytes,
            "on_frontier": candidate in ranking.frontier,
            "as_fast_as_the_first": candidate in fastest,
            "as_cheap_as_the_first": candidate in cheapest,
            "notes": plan.notes,
        }

    def fits(candidate: Candidate) -> bool | None:
        known = None not in (candidate.plan.strategy.memory_bytes, _peak_bytes(candidate))
        return True if known else None

    content = {
        "global_size": next((each.plan.batch.global_size for each in all_candidates(ranking)), None),
        "steps": next((each.plan.train.steps for each in all_candidates(ranking)), None),
        "cells": [record(each, fits(each)) for each in ranked(ranking)]
        + [record(each, False) for each in ranking.too_large],
        "by_time": [each.label for each in ranking.by_time],
        "by_gpu_hours": [each.label for each in ranking.by_gpu_time],
        "frontier": [each.label for each in ranking.frontier],
        "impossible": [{"cells": labels, "reason": reason} for reason, labels in ranking.impossible.items()],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _peak_bytes(candidate: Candidate) -> int | None:
    return None if candidate.forecast is None else candidate.forecast.peak_bytes


def _text_of_bytes(number: int | None) -> str:
    return "" if number is None else bytes_text(number)


def _step_s(candidate: Candidate) -> float:
    return 0.0 if candidate.step is None else candidate.step.step_s
