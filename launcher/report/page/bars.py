"""Plots with a bar a run: what a step is made of, and what a loss has cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.report.comparison.compare import Row, TaskGroup
from launcher.report.page.plot import MANY_BARS, Plot, hover_names, layout, ms, names
from launcher.report.page.style import Style

_PARTS = {
    "compute": "#44576f", "not told apart": "#a9b8cc", "communication that shows": "#e8710a",
    "waiting for data": "#f2c14e",
}  # fmt: skip


def step_split(group: TaskGroup) -> Plot | None:
    rows = [row for row in group.rows if row.measured and row.measured.step_s is not None]
    if not rows:
        return None
    split = [row for row in rows if row.exposed_s is not None]
    whole = [row for row in rows if row.exposed_s is None]
    called, hovers, flat = names(group), hover_names(group), len(rows) <= MANY_BARS
    parts: list[tuple[str, list[Row], Callable[[Row], float | None], dict[str, Any]]] = [
        ("compute", split, lambda row: row.rest_s, {"color": _PARTS["compute"]}),
        (
            "compute and communication, not told apart", whole, lambda row: row.rest_s,
            {"color": _PARTS["not told apart"]},
        ),
        (
            "communication that shows", split, lambda row: row.exposed_s,
            {"color": _PARTS["communication that shows"]},
        ),
        (
            "waiting for data", rows, lambda row: row.measured.data_s if row.measured else None,
            {"color": _PARTS["waiting for data"]},
        ),
    ]  # fmt: skip
    place = {id(row): number for number, row in enumerate(rows)}
    data: list[dict[str, Any]] = []
    for name, which, part, marker in parts:
        if not which:
            continue
        along, values = [place[id(row)] for row in which], [ms(part(row)) for row in which]
        data.append(
            {
                "type": "bar", "name": name, "orientation": "h" if flat else "v",
                "marker": {**marker, "line": {"width": 0}},
                "x": values if flat else along, "y": along if flat else values,
                "text": [hovers[id(row)] for row in which], "textposition": "none",
                "hovertemplate": f"%{{text}}<br>{name}: %{{{'x' if flat else 'y'}:.4g}} ms<extra></extra>",
            }
        )  # fmt: skip
    form = layout("ms a step (median)", "", height=130 + 26 * len(rows) if flat else 420)
    form |= {"barmode": "stack", "bargap": 0.28 if flat else 0.1}
    form["legend"] = form["legend"] | {"traceorder": "normal"}
    if flat:
        _named(form, [called[id(row)] for row in rows])
    else:
        _upright(form)
    caption = "Communication shows where a step takes longer than the same micro-batches without any collective."
    if whole:
        caption += " Pale: this was not measured, so computation and communication are one bar."
    return Plot(title="Where the time of a step goes", caption=caption, data=data, layout=form, wide=True)


def hours(group: TaskGroup, style: Style) -> Plot | None:
    if group.loss is None or not group.rows:
        return None
    rows, called, hovers = list(group.rows), names(group), hover_names(group)
    flat = len(rows) <= MANY_BARS
    values = [0.0 if row.hours is None else row.hours for row in rows]
    heading, times = group.time_unit
    sizes = [value * times for value in values]
    said = ["  not reached" if row.hours is None else f"  {size:.3g}" for row, size in zip(rows, sizes, strict=True)]
    hover = [
        f"{hovers[id(row)]}<br>"
        + ("not reached" if row.hours is None else f"{size:.4g} {heading}, at step {row.reached_step:,}")
        for row, size in zip(rows, sizes, strict=True)
    ]
    place = list(range(len(rows)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h" if flat else "v",
            "x": sizes if flat else place, "y": place if flat else sizes,
            "marker": {"color": [style.colour(row) for row in rows], "line": {"width": 0}},
            "text": said, "textposition": "outside" if flat else "none", "cliponaxis": False,
            "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>", "showlegend": False,
        }
    ]  # fmt: skip
    form = layout(
        f"{heading} to a training loss of {group.loss:.4g}",
        "",
        height=96 + 26 * len(rows) if flat else 380,
        legend=False,
    )
    form["bargap"] = 0.28 if flat else 0.1
    if flat:
        _named(form, [called[id(row)] for row in rows])
        form["xaxis"]["range"] = [0, 1.15 * max(sizes) or 1]
    else:
        _upright(form)
    which = (
        "the loss that was asked for" if group.given else "the lowest that every finished run of this task has reached"
    )
    caption = f"Workers × wall time until the smoothed training loss was {group.loss:.4g} or lower: {which}."
    title = f"{heading[0].upper()}{heading[1:]} to a loss"
    return Plot(title=title, caption=caption, data=data, layout=form, wide=True)


def _named(form: dict[str, Any], said: Sequence[str]) -> None:
    """Flat bars, the first on top, each with its run's name."""
    ticks = {"tickvals": list(range(len(said))), "ticktext": [f"{name}  " for name in said]}
    form["yaxis"] |= {"autorange": "reversed", "showgrid": False, "zeroline": False, "title": {"text": ""}, **ticks}


def _upright(form: dict[str, Any]) -> None:
    """Of so many runs that there is no room for names."""
    form["xaxis"], form["yaxis"] = form["yaxis"], form["xaxis"]
    form["xaxis"] |= {
        "showticklabels": False,
        "zeroline": False,
        "title": {"text": "runs, in the order of the table: hover for names"},
    }
