"""Parts of plots: layout, colours, dashes, lines. Plain JSON in plotly's format."""

from __future__ import annotations

import colorsys
import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.report import compare
from launcher.report.compare import Key, Row, TaskGroup

INK, GRID, QUIET = "#1f2937", "#e5e7eb", "#94a3b8"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
# above these numbers, lines are identified by hovering instead of a legend, and bars have no names
MANY = 14
MANY_BARS = 32


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Plot in plotly's format with title and caption.

    Attributes:
        choices: buttons; each has other x columns for the traces and the axis title.
    """

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    choices: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def text(words: str) -> str:
    """Escape text for use inside a plot, where plotly would interpret some markup."""
    return html.escape(words).replace("%{", "%&#123;")


def layout(x: str, y: str, *, height: int = 380, legend: bool = True) -> dict[str, Any]:
    """Return a layout: axes with names and units, and a legend below them that covers no data."""
    axis = {"gridcolor": GRID, "zerolinecolor": "#cbd5e1", "linecolor": "#cbd5e1", "automargin": True}
    return {
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 30, "b": 56},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": _FONT, "size": 13, "color": INK},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 13, "color": INK}},
        "showlegend": legend,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "xaxis": {**axis, "title": {"text": x, "standoff": 10}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 8}},
    }


def names(group: TaskGroup) -> dict[int, str]:
    """Return each row's name in the plots, by the row's id: its label, with its state unless it is a finished run."""
    return {id(row): called(row) for row in group.rows}


def hover_names(group: TaskGroup) -> dict[int, str]:
    """Return the same names extended by the varied settings that the label lacks."""
    return {id(row): text(group.said(row) + ("" if row.done else f" ({row.entry.state})")) for row in group.rows}


def called(row: Row) -> str:
    return text(row.entry.label if row.done else f"{row.entry.label} ({row.entry.state})")


def level(value: float) -> dict[str, Any]:
    line = {"color": "#64748b", "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line, "layer": "below"}


def said_at(value: float, words: str) -> dict[str, Any]:
    font = {"size": 12, "color": "#64748b"}
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "y": value, "yanchor": "top", "text": words, "showarrow": False,
        "font": font,
    }  # fmt: skip


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else short(1e3 * seconds)


def mb(number: float | None) -> float | None:
    return None if number is None else number / 1e6


def short(value: float) -> float:
    """Round to six digits: more are invisible, and would enlarge the page."""
    return float(f"{value:.6g}")


_COLOURS = (
    "#2563eb", "#e8710a", "#16935a", "#c62f4b", "#7c4dcc", "#0e8fa8", "#b8860b", "#d1529b", "#6b4f3a", "#556070",
)  # fmt: skip
_LOOKS = ("solid", "dashed", "dotted", "dash-dotted", "long dashes", "long dash-dots")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


class Style:
    """Colours and dashes of one task's runs. If runs differ only in the workers, colours stand for the workers."""

    def __init__(self, rows: Sequence[Row]) -> None:
        facts = [row.facts for row in rows if row.facts is not None]
        lines = compare.over_workers(facts)
        self._worlds = sorted({each.world_size for each in facts})
        self._by_world = len(set(lines)) == 1
        keys = [
            str(each.world_size) if self._by_world else compare.said(line)
            for each, line in zip(facts, lines, strict=True)
        ]
        known = sorted(set(keys), key=compare.natural)
        self._colour = {key: _colour(number, len(known)) for number, key in enumerate(known)}
        self._of = {id(row): key for row, key in zip([row for row in rows if row.facts], keys, strict=True)}

    def colour(self, row: Row) -> str:
        return self._colour[self._of[id(row)]]

    def dash(self, row: Row) -> str:
        if self._by_world or row.facts is None:
            return "solid"
        return self.dash_of(self._worlds.index(row.facts.world_size))

    @staticmethod
    def dash_of(number: int) -> str:
        return _DASHES[number % len(_DASHES)]

    @property
    def said(self) -> str:
        """Return the caption's explanation of colours and dashes."""
        if len(self._of) == 1:
            return ""
        if self._by_world:
            return "A colour for each number of workers, the same in all plots."
        if len(self._worlds) == 1:
            return "A colour for each configuration, the same in all plots."
        dashes = ", ".join(
            f"{_LOOKS[number % len(_DASHES)]}: {world} worker{'' if world == 1 else 's'}"
            for number, world in enumerate(self._worlds[: len(_DASHES)])
        )
        return f"A colour for each setting, the same in all plots; {dashes}."


def _colour(number: int, count: int) -> str:
    if count <= len(_COLOURS):
        return _COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(0.62 - 0.92 * number / count, 0.42, 0.62)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


# maximum number of legend entries in a plot of half the page's width
_NAMED = 9

Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class Lines:
    """Runs over ``x``, one line for each key.

    Attributes:
        neutral: lines differ only in dashes; points have the colours of the settings, which change along a line.
    """

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
        ordered = dict(sorted(found.items(), key=lambda item: compare.natural(compare.said(item[0]))))
        return cls(group, style, ordered, x, axis, neutral)

    @property
    def hint(self) -> str:
        return "" if len(self.lines) <= _NAMED else " Hover for the names."

    def traces(self, y: Number, hover: str) -> list[dict[str, Any]]:
        """Return one trace per line with the runs that have ``y``; a hollow point is an unfinished run."""
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
                    "type": "scatter", "mode": "lines+markers", "name": text(compare.said(key)) or "all runs",
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
        """Return the layout: log2-spaced x axis with ticks only at values that were run, y axis from zero."""
        form = layout(self.axis, y_axis, legend=len(self.lines) <= _NAMED)
        ticks = sorted({self.x(row) for line in self.lines.values() for row in line})
        form["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
        form["yaxis"]["rangemode"] = "tozero"
        return form
