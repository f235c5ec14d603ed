"""The page of `launch report`: one file that opens without network, for people who have never seen this tool."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from importlib import metadata
from typing import Any

from launcher.report.comparison import series
from launcher.report.comparison.compare import Comparison, Row, TaskGroup
from launcher.report.comparison.export import DEFINITIONS, shown_speedup
from launcher.report.comparison.headlines import headlines
from launcher.report.page.plots import Plot, plots

_CONSTANT = {
    "cluster.device": "device", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "optimizer.lr": "learning rate", "train.steps": "steps",
}  # fmt: skip
_SHOWN_VALUES = 8


def page(comparison: Comparison, now: datetime) -> str:
    """The whole HTML text. ``now``: with a time zone."""
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
        loader=jinja2.PackageLoader("launcher", "report/page"),
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
        # inside <script> nothing may look like its end
        figures=Markup(orjson.dumps(drawn).decode().replace("<", "\\u003c")),
    )


def _states(comparison: Comparison) -> list[tuple[str, int]]:
    return Counter(row.entry.state for row in comparison.rows).most_common()


def _varied(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [row.facts for row in comparison.rows if row.facts]
    found: list[tuple[str, str]] = []
    for key in comparison.varying:
        values = sorted({each.settings.get(key, "null") for each in facts}, key=series.natural)
        more = f" and {len(values) - _SHOWN_VALUES} more" if len(values) > _SHOWN_VALUES else ""
        found.append((key, ", ".join(_open(value) for value in values[:_SHOWN_VALUES]) + more))
    return found


def _constant(comparison: Comparison) -> list[tuple[str, str]]:
    """What a reader may take for granted of all runs."""
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
    """Which plots there are not, and why."""
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
    """Of the table: name, unit."""
    hours = "/".join(sorted({group.hours for group in comparison.groups})) or "worker-hours"
    return [
        ("run", ""), ("state", ""), ("workers", ""), ("global batch", "samples"), ("accumulation", ""), ("step", ""),
        ("step time", "ms"), ("compute", "ms"), ("exposed comm.", "ms"), ("data", "ms"), ("speed", "samples/s"),
        ("efficiency", "%"), ("wire", "MB/step"), ("saved", "%"), ("speed-up", "×"), ("loss, smoothed", ""),
        ("held-out loss", ""), (f"{hours} to loss", ""),
    ]  # fmt: skip


def _line(comparison: Comparison, row: Row) -> dict[str, Any]:
    """A row of the table: texts, and what they are sorted by."""
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
