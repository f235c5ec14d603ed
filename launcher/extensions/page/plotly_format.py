"""Plots in plotly's format, and what their layouts have in common."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.extensions.page.compare import Row

# visible on white and on black
NEUTRAL = "#7c8aa0"
# above this number of bars, they are identified by hovering instead of a label
MAX_BARS = 32


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Plot in plotly's format with title and caption.

    Attributes:
        choices: groups of buttons. A button has what it changes in the traces (a value for each) and in the layout;
            the first one of each group is in effect at first.
    """

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    choices: Sequence[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = ()


def escape(text: str) -> str:
    """Escape text for use inside a plot, where plotly would interpret some markup."""
    return html.escape(text).replace("%{", "%&#123;")


def axes_layout(x: str, y: str, *, height: int = 380, legend: bool = True) -> dict[str, Any]:
    """Return a layout with the axes' names and units; page.js has what all layouts share."""
    return {
        "height": height, "showlegend": legend, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
    }  # fmt: skip


def bar_layout(rows: Sequence[Row], axis: str, *, legend: bool) -> dict[str, Any]:
    """Return the layout of horizontal bars, the first on top, labelled with the runs' names if there is room."""
    labelled = len(rows) <= MAX_BARS
    height = 96 + 34 * legend + (26 * len(rows) if labelled else 600)
    side = "" if labelled else "runs in the order of the table; hover for names"
    layout = axes_layout(axis, side, height=height, legend=legend)
    layout |= {"barmode": "stack", "bargap": 0.28 if labelled else 0.1}
    layout["yaxis"] |= {
        "autorange": "reversed", "showgrid": False, "zeroline": False, "showticklabels": labelled,
        "tickvals": list(range(len(rows))), "ticktext": [f"{escape(row.name)}  " for row in rows],
    }  # fmt: skip
    return layout
