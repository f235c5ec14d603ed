"""HTML page of `launch report`: one file that works offline, for readers who do not know this tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from typing import Any

from launcher.quantities import NO_INTERVAL
from launcher.report import compare
from launcher.report.compare import Comparison, Row, TaskGroup
from launcher.report.export import DEFINITIONS, shown_speedup
from launcher.report.plot_parts import Plot
from launcher.report.plots import plots


@dataclass(frozen=True)
class Headline:
    """Headline of the page: a large ``figure`` and ``words`` that explain it."""

    figure: str
    words: str


def headlines(group: TaskGroup) -> list[Headline]:
    """Return at most four headlines; none if no run has finished."""
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
    """Return the headline on scaling from the fewest workers to the most that were compared with them."""
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


_CONSTANT = {
    "cluster.device": "device", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "optimizer.lr": "learning rate", "train.steps": "steps",
}  # fmt: skip
_SHOWN_VALUES = 8


def page(comparison: Comparison, now: datetime) -> str:
    """Return the HTML text.

    Args:
        now: time with a time zone.
    """
    import jinja2
    import orjson
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    drawn: list[Plot] = []
    sections: list[dict[str, Any]] = []
    for group in comparison.groups:
        mine = plots(group)
        numbered = [(len(drawn) + number, plot) for number, plot in enumerate(mine)]
        drawn += mine
        sections.append(
            {"target": group.target, "headlines": headlines(group), "plots": numbered, "unsaid": _unsaid(group)}
        )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("launcher", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=comparison.title,
        now=now.strftime("%Y-%m-%d %H:%M %Z"),
        version=metadata.version("launcher"),
        states=_states(comparison),
        varied=_varied(comparison),
        constant=_constant(comparison),
        sections=sections,
        columns=_columns(comparison),
        table=[_line(comparison, row) for row in comparison.rows],
        notes=comparison.notes,
        definitions=DEFINITIONS,
        plotly=Markup(get_plotlyjs()),
        # escaped so that no text can close the <script> element
        figures=Markup(orjson.dumps(drawn).decode().replace("<", "\\u003c")),
    )


def _states(comparison: Comparison) -> list[tuple[str, int]]:
    return Counter(row.entry.state for row in comparison.rows).most_common()


def _varied(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [row.facts for row in comparison.rows if row.facts]
    found: list[tuple[str, str]] = []
    for key in comparison.varying:
        values = sorted({each.settings.get(key, "null") for each in facts}, key=compare.natural)
        more = f" and {len(values) - _SHOWN_VALUES} more" if len(values) > _SHOWN_VALUES else ""
        found.append((key, ", ".join(_open(value) for value in values[:_SHOWN_VALUES]) + more))
    return found


def _constant(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the settings that all runs share."""
    facts = [row.facts for row in comparison.rows if row.facts]
    if not facts:
        return []
    same = facts[0]
    known = {
        "task": {each.target for each in facts},
        "workers": {str(each.world_size) for each in facts},
        "global batch": {f"{each.global_size:,} samples" for each in facts},
        "accumulation": {str(each.accumulation) for each in facts},
        "sync policy": {each.sync for each in facts},
    }
    found = [(name, values.pop()) for name, values in known.items() if len(values) == 1]
    for key, name in _CONSTANT.items():
        if key not in comparison.varying and key in same.settings:
            found.append((name, _open(same.settings[key])))
    return found


def _open(value: str) -> str:
    return "left open" if value == "null" else value


def _unsaid(group: TaskGroup) -> list[str]:
    """Return which plots are missing, and why."""
    facts = [row.facts for row in group.rows if row.facts]
    words: list[str] = []
    worlds, counts = {each.world_size for each in facts}, {each.accumulation for each in facts if each.world_size > 1}
    if len(worlds) == 1:
        words.append(f"Workers: {worlds.pop()} in all runs, so there is no scaling to show.")
    if len(counts) == 1:
        words.append(
            f"All runs on several workers have accumulation {counts.pop()}: bytes and speed-up are in the table."
        )
    if group.loss is None:
        words.append(f"No run has finished: there is no loss to count {group.hours} to. `--loss X` names one.")
    return words


def _columns(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (name, unit) of each column of the table."""
    hours = "/".join(sorted({group.hours for group in comparison.groups})) or "worker-hours"
    return [
        ("run", ""), ("state", ""), ("workers", ""), ("global batch", "samples"), ("accumulation", ""), ("step", ""),
        ("step time", "ms"), ("compute", "ms"), ("exposed comm.", "ms"), ("data", "ms"), ("speed", "samples/s"),
        ("efficiency", "%"), ("wire", "MB/step"), ("saved", "%"), ("speed-up", "×"), ("loss, smoothed", ""),
        ("held-out loss", ""), (f"{hours} to loss", ""),
    ]  # fmt: skip


def _line(comparison: Comparison, row: Row) -> dict[str, Any]:
    """Return a row of the table: each cell's text and sort key."""
    facts, m, entry = row.facts, row.measured, row.entry
    group = next((each for each in comparison.groups if facts and each.target == facts.target), None)
    said = [entry.detail, f"in {entry.elsewhere}" if entry.elsewhere else "", row.figures.problem]
    said.append("the same run as an earlier row" if row.same_as else "")
    cells = [
        _cell(facts and facts.world_size, 1, ",d"),
        _cell(facts and facts.global_size, 1, ",d"),
        _cell(facts and facts.accumulation, 1, ",d"),
        _cell(m and m.step, 1, ",d"),
        _cell(m and m.step_s, 1e3, ",.1f"),
        _cell(row.rest_s if row.exposed_s is not None else None, 1e3, ",.1f"),
        _cell(row.exposed_s, 1e3, ",.1f"),
        _cell(m and m.data_s, 1e3, ",.2f"),
        _cell(row.samples_per_s, 1, ",.1f"),
        _cell(row.efficiency and row.efficiency.value, 100, ".1f"),
        _cell(m and m.wire_bytes, 1e-6, ",.2f"),
        _cell(row.saved_fraction, 100, ".1f"),
        (shown_speedup(m), repr(m.speedup)) if m and m.speedup_95 is not None else _cell(None, 1, ""),
        _cell(m and m.smoothed, 1, ".4f"),
        _cell(m and m.eval_loss, 1, ".4f"),
        _cell(row.hours, 1, ".4g"),
    ]
    if row.hours is None and group is not None and group.loss is not None and m is not None:
        cells[-1] = ("not reached", "")
    return {"label": entry.label, "state": entry.state, "said": "; ".join(filter(None, said)), "cells": cells}


def _cell(value: float | None, times: float, form: str) -> tuple[str, str]:
    return ("–", "") if value is None else (format(value * times, form), repr(value))
