"""How a configuration looks in every plot of a page: a colour for its settings, a dash for its number of workers."""

from __future__ import annotations

import colorsys
import html
from collections.abc import Sequence

from launcher.report import series
from launcher.report.compare import Row, TaskGroup

INK, GRID, QUIET = "#1f2937", "#e5e7eb", "#94a3b8"
_COLOURS = (
    "#2563eb", "#e8710a", "#16935a", "#c62f4b", "#7c4dcc", "#0e8fa8", "#b8860b", "#d1529b", "#6b4f3a", "#556070",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


class Style:
    """Of one task's runs. Where they differ in nothing but the workers, the workers have the colours."""

    def __init__(self, rows: Sequence[Row]) -> None:
        facts = [row.facts for row in rows if row.facts is not None]
        lines = series.over_workers(facts)
        self._worlds = sorted({each.world_size for each in facts})
        self._by_world = len(set(lines)) == 1
        keys = [str(each.world_size) if self._by_world else series.said(line) for each, line in zip(facts, lines, strict=True)]
        known = sorted(set(keys), key=series.natural)
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
        """What a reader of the legend should know."""
        if self._by_world:
            return "A colour for each number of workers, the same in all plots."
        if len(self._worlds) == 1:
            return "A colour for each configuration, the same in all plots."
        dashes = ", ".join(
            f"{_LOOKS[number % len(_DASHES)]}: {world} worker{'' if world == 1 else 's'}"
            for number, world in enumerate(self._worlds[: len(_DASHES)])
        )
        return f"A colour for each setting, the same in all plots; {dashes}."


_LOOKS = ("solid", "dashed", "dotted", "dash-dotted", "long dashes", "long dash-dots")


def _colour(number: int, count: int) -> str:
    if count <= len(_COLOURS):
        return _COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(0.62 - 0.92 * number / count, 0.42, 0.62)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def text(words: str) -> str:
    """Words inside a plot, which takes some markup: none of it is meant."""
    return html.escape(words).replace("%{", "%&#123;")


def layout(x: str, y: str, *, height: int = 380, legend: bool = True) -> dict[str, object]:
    """Axes with names and units, a legend below them that covers no data."""
    axis: dict[str, object] = {"gridcolor": GRID, "zerolinecolor": "#cbd5e1", "linecolor": "#cbd5e1", "automargin": True}
    return {
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 12, "b": 56},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif", "size": 13, "color": INK},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"size": 13, "color": INK}},
        "showlegend": legend,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "xaxis": {**axis, "title": {"text": x, "standoff": 10}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 8}},
    }


def names(group: TaskGroup) -> dict[int, str]:
    """Of each row, by its id, how the plots call it: its label, with its state where it is not a finished run."""
    return {
        id(row): text(row.entry.label if row.done else f"{row.entry.label} ({row.entry.state})") for row in group.rows
    }
