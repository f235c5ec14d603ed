"""All plots of one task's runs. Nothing in them is averaged over runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.report.comparison.compare import TaskGroup
from launcher.report.comparison.curve import Curve
from launcher.report.comparison.figures import SMOOTHED_OVER, Measured
from launcher.report.page.bars import hours, step_split
from launcher.report.page.plot import MANY, Plot, hover_names, layout, level, names, said_at, short
from launcher.report.page.saving import over_accumulation
from launcher.report.page.scaling import over_workers
from launcher.report.page.style import Style

_KINDS: dict[str, Callable[[Measured], Curve]] = {
    "training loss": lambda measured: measured.curve,
    "smoothed": lambda measured: measured.smooth,
    "held-out loss": lambda measured: measured.held_out,
}


def plots(group: TaskGroup) -> list[Plot]:
    style = Style(group.rows)
    made = [
        step_split(group), *over_workers(group, style), *over_accumulation(group, style), loss(group, style),
        hours(group, style),
    ]  # fmt: skip
    return [plot for plot in made if plot is not None]


def loss(group: TaskGroup, style: Style) -> Plot | None:
    called, hovers, few = names(group), hover_names(group), len(group.rows) <= MANY
    data: list[dict[str, Any]] = []
    columns: dict[str, list[list[float]]] = {"steps": [], "samples": [], "wall time": []}
    for kind in _KINDS:
        for row in group.rows:
            if row.measured is None or not (curve := _KINDS[kind](row.measured)).steps:
                continue
            for column, values in zip(columns.values(), (curve.steps, curve.samples, curve.seconds), strict=True):
                column.append([short(value) for value in values])
            data.append(
                {
                    "type": "scatter", "mode": "lines+markers" if kind == "held-out loss" else "lines",
                    "name": called[id(row)], "meta": kind, "visible": kind == "training loss",
                    "x": columns["steps"][-1],
                    "y": [None if value != value else short(value) for value in curve.losses],
                    "line": {"color": style.colour(row), "dash": style.dash(row), "width": 1.8 if few else 1},
                    "opacity": 0.95 if few else 0.6, "connectgaps": False,
                    "text": hovers[id(row)],
                    "hovertemplate": f"%{{text}}<br>{kind} %{{y:.4f}} at %{{x:,.6g}}<extra></extra>",
                }
            )  # fmt: skip
    if not data:
        return None
    form = layout("optimizer steps", "training loss (mean over the step's items)", height=500, legend=few)
    if group.loss is not None:
        form["shapes"] = [level(group.loss)]
        form["annotations"] = [said_at(group.loss, f"{group.loss:.4g}: hours are counted to it")]
    titles = {"steps": "optimizer steps", "samples": "samples seen", "wall time": "wall seconds of training"}
    return Plot(
        title="Loss",
        caption=f"{style.said} Long records are drawn with the lowest and the highest loss of each stretch, so that no "
        f"spike is hidden; smoothed: the mean of the newest {SMOOTHED_OVER} logged. {_spread(group)}"
        f"{'' if few else 'Hover for the names.'}".strip(),
        data=data,
        layout=form,
        wide=True,
        choices={name: {"x": values, "title": titles[name]} for name, values in columns.items()},
    )


def _spread(group: TaskGroup) -> str:
    """Curves that lie on each other hide each other: how near they end is said."""
    last = [row.measured.smoothed for row in group.rows if row.done and row.measured and row.measured.smoothed]
    if len(last) < 2:
        return ""
    return f"The {len(last)} finished runs end between {min(last):.4f} and {max(last):.4f} (smoothed). "
