"""HTML page of `launch plan -m`: step time against GPU-hours, and the table, in one file that works offline."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from launcher.plan.ranking import Candidate, Ranking
from launcher.quantities import bytes_text, count
from launcher.report.page import render
from launcher.report.plotly_format import Plot
from launcher.report.ranking_table import columns, gpu_hours_unit, policy_text, ranked, sentences

_COLOURS = {"single": "#556070", "ddp": "#2563eb", "fsdp": "#e8710a", "hsdp": "#16935a"}
_FRONTIER = "#94a3b8"


def ranking_page(ranking: Ranking, title: str, now: datetime) -> str:
    """Return the HTML text.

    Args:
        title: the settings that all candidates share.
        now: time with a time zone.
    """
    drawn = frontier_plots(ranking)
    first = next(iter((*ranked(ranking), *ranking.too_large)), None)
    job = "" if first is None else f"{first.plan.task.target}, {count(first.plan.batch.global_size, 'sample')} a step"
    return render(
        "ranking.html.j2",
        drawn,
        title=title,
        now=now.strftime("%Y-%m-%d %H:%M %Z"),
        job=job,
        plots=list(enumerate(drawn)),
        sentences=list(sentences(ranking)),
        columns=[(column.heading, column.unit) for column in columns(ranking)],
        table=[_line(ranking, each) for each in ranked(ranking)],
        too_large=[
            {
                "label": each.label,
                "policy": policy_text(each),
                "needs": bytes_text((each.forecast and each.forecast.peak_bytes) or 0),
                "missing": bytes_text(each.missing_bytes),
                "memory": bytes_text(each.plan.strategy.memory_bytes or 0),
            }
            for each in ranking.too_large
        ],
        impossible=ranking.impossible,
        notes=ranking.notes,
    )


def _line(ranking: Ranking, candidate: Candidate) -> dict[str, Any]:
    """Return a row of the page's table: each cell's text and sort key."""
    cells = [(column.text(candidate) or "–", _key(column.value(candidate))) for column in columns(ranking)]
    on_frontier = candidate in ranking.frontier
    return {"label": candidate.label, "policy": policy_text(candidate), "cells": cells, "frontier": on_frontier}


def _key(value: float | None) -> str:
    return "" if value is None else repr(value)


def frontier_plots(ranking: Ranking) -> list[Plot]:
    """Return the plot of step time against GPU-hours; none if no GPU-hours are predicted."""
    if not any(each.gpu_hours is not None for each in ranking.by_time):
        return []
    unit = gpu_hours_unit(ranking)
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "frontier", "hoverinfo": "skip",
            "x": [each.gpu_hours for each in ranking.frontier], "y": [_step_s(each) for each in ranking.frontier],
            "line": {"color": _FRONTIER, "width": 1.4, "dash": "dot"},
        }
    ]  # fmt: skip
    for kind, colour in _COLOURS.items():
        cells = [each for each in ranking.by_time if each.plan.strategy.kind.value == kind]
        if cells:
            data.append(_points(kind, colour, cells, unit))
    caption = (
        "Each point is a cell; bars: 90% interval of its step time. Dotted: the frontier, on which no other cell is "
        f"both faster and takes fewer {unit} to the end of the run. Hover for the settings."
    )
    layout = {
        "height": 520, "showlegend": True, "hovermode": "closest",
        "xaxis": {"title": {"text": f"{unit} to the end of the run"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "predicted step time, s"}, "rangemode": "tozero"},
    }  # fmt: skip
    return [Plot(title=f"Step time against {unit}", caption=caption, data=data, layout=layout, wide=True)]


def _points(kind: str, colour: str, cells: Sequence[Candidate], unit: str) -> dict[str, Any]:
    steps = [each.step for each in cells if each.step is not None]
    texts = [html.escape(f"{each.label}, {each.plan.strategy.sync.value}").replace("%{", "%&#123;") for each in cells]
    return {
        "type": "scatter", "mode": "markers", "name": kind, "marker": {"color": colour, "size": 9},
        "x": [each.gpu_hours for each in cells], "y": [step.step_s for step in steps],
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1, "color": colour,
            "array": [step.high_s - step.step_s for step in steps],
            "arrayminus": [step.step_s - step.low_s for step in steps],
        },
        "text": texts, "hovertemplate": f"%{{text}}<br>%{{y:.4g}} s a step, %{{x:.4g}} {unit}<extra></extra>",
    }  # fmt: skip


def _step_s(candidate: Candidate) -> float | None:
    return None if candidate.step is None else candidate.step.step_s
