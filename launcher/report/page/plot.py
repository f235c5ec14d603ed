"""What all plots are made of: plain JSON, as plotly takes it."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from launcher.report.comparison.compare import Row, TaskGroup

INK, GRID, QUIET = "#1f2937", "#e5e7eb", "#94a3b8"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
# more lines than this are told apart by the pointer, not by a legend; more bars have no room for names
MANY = 14
MANY_BARS = 32


@dataclass(frozen=True, kw_only=True)
class Plot:
    """``choices``: buttons; each names the visible traces' other x columns, or which traces show."""

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    choices: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def text(words: str) -> str:
    """Words inside a plot, which takes some markup: none of it is meant."""
    return html.escape(words).replace("%{", "%&#123;")


def layout(x: str, y: str, *, height: int = 380, legend: bool = True) -> dict[str, Any]:
    """Axes with names and units, a legend below them that covers no data."""
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
    """Of each row, by its id, how the plots call it: its label, with its state where it is not a finished run."""
    return {id(row): called(row) for row in group.rows}


def hover_names(group: TaskGroup) -> dict[int, str]:
    """The same with what was varied, where the label does not say it."""
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
    """Six digits: more cannot be seen, and the page carries each of them."""
    return float(f"{value:.6g}")
