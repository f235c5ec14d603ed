"""Plots with a line a series of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.comparison import series
from launcher.report.comparison.compare import Row, TaskGroup
from launcher.report.comparison.series import Key
from launcher.report.page.plot import hover_names, layout, text
from launcher.report.page.style import Style

# of a plot that has half of the page
_NAMED = 9

Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class Lines:
    """Runs over ``x``, one line for each ``key``. ``neutral``: lines have dashes only, and their points the colours of
    the settings, which change along a line."""

    group: TaskGroup
    style: Style
    lines: dict[Key, list[Row]]
    x: Callable[[Row], int]
    axis: str
    neutral: bool = False

    @classmethod
    def of(
        cls, group: TaskGroup, style: Style, rows: Sequence[Row], keys: Sequence[Key], x: Callable[[Row], int],
        axis: str, *, neutral: bool = False,
    ) -> Lines:  # fmt: skip
        found: dict[Key, list[Row]] = defaultdict(list)
        for row, key in zip(rows, keys, strict=True):
            found[key].append(row)
        ordered = dict(sorted(found.items(), key=lambda item: series.natural(series.said(item[0]))))
        return cls(group, style, ordered, x, axis, neutral)

    @property
    def hint(self) -> str:
        return "" if len(self.lines) <= _NAMED else " Hover for the names."

    def traces(self, y: Number, hover: str) -> list[dict[str, Any]]:
        """A line a series, of the runs that have ``y``; a hollow point is a run that is not finished."""
        data: list[dict[str, Any]] = []
        hovers = hover_names(self.group)
        for number, (key, line) in enumerate(self.lines.items()):
            points = [(self.x(row), value, hovers[id(row)], row) for row in line if (value := y(row)) is not None]
            points.sort(key=lambda point: point[:2])
            if not points:
                continue
            colours = [self.style.colour(row) for *_, row in points]
            stroke = {"color": "#475569", "dash": Style.dash_of(number)} if self.neutral else {"color": colours[0]}
            data.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": text(series.said(key)) or "all runs",
                    "x": [x for x, *_ in points], "y": [value for _, value, *_ in points],
                    "line": {**stroke, "width": 2},
                    "marker": {
                        "size": 9, "color": colours if self.neutral else colours[0],
                        "symbol": ["circle" if row.done else "circle-open" for *_, row in points],
                    },
                    "text": [words for _, _, words, _ in points],
                    "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
                }
            )  # fmt: skip
        return data

    def form(self, y_axis: str) -> dict[str, Any]:
        """Doublings are equally far apart, only what was run has a tick, and the y axis begins at zero."""
        form = layout(self.axis, y_axis, legend=len(self.lines) <= _NAMED)
        ticks = sorted({self.x(row) for line in self.lines.values() for row in line})
        form["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
        form["yaxis"]["rangemode"] = "tozero"
        return form
