"""All plots of one task's runs: loss, step time, cost, saving, scaling. Nothing is averaged over runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.report import compare
from launcher.report.compare import Row, TaskGroup
from launcher.report.figures import SMOOTHED_OVER, Curve, Measured
from launcher.report.plot_parts import (
    MANY,
    MANY_BARS,
    QUIET,
    Lines,
    Plot,
    Style,
    hover_names,
    layout,
    level,
    mb,
    ms,
    names,
    said_at,
    short,
)

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
    """Label the axis of horizontal bars with the runs' names, the first on top."""
    ticks = {"tickvals": list(range(len(said))), "ticktext": [f"{name}  " for name in said]}
    form["yaxis"] |= {"autorange": "reversed", "showgrid": False, "zeroline": False, "title": {"text": ""}, **ticks}


def _upright(form: dict[str, Any]) -> None:
    """Configure vertical bars for so many runs that there is no room for names."""
    form["xaxis"], form["yaxis"] = form["yaxis"], form["xaxis"]
    form["xaxis"] |= {
        "showticklabels": False,
        "zeroline": False,
        "title": {"text": "runs, in the order of the table: hover for names"},
    }


_EVERY = "had every micro-batch been synchronised"


def over_accumulation(group: TaskGroup, style: Style) -> list[Plot]:
    """Return the plots over accumulation for runs on several workers; none if all accumulate equally."""
    rows = [row for row in group.rows if row.facts and row.facts.world_size > 1 and row.measured]
    rows = [row for row in rows if row.measured and row.measured.windows]
    if len({_accumulation(row) for row in rows}) < 2:
        return []
    keys = compare.over_accumulation([row.facts for row in rows if row.facts])
    axis = "accumulation (micro-batches a worker and step)"
    lines = Lines.of(group, style, rows, keys, _accumulation, axis, neutral=True)
    found = [_wire(lines)]
    if any(row.measured and row.measured.speedup_95 for row in rows):
        found.append(_speedup(lines))
    return found


def _wire(lines: Lines) -> Plot:
    sent = lines.traces(lambda row: mb(row.measured.wire_bytes if row.measured else None), "%{y:,.2f} MB, as run")
    every = lines.traces(
        lambda row: mb(row.measured.wire_bytes_every if row.measured else None), f"%{{y:,.2f}} MB, {_EVERY}"
    )
    if len(lines.lines) == 1:
        sent[0]["name"] = "as run"
    for number, trace in enumerate(every):  # all share one legend entry
        trace |= {"name": _EVERY, "legendgroup": "every", "showlegend": number == 0}
        trace |= {"line": {"color": QUIET, "width": 1.6, "dash": "dot"}, "marker": {"color": QUIET, "size": 6}}
    return Plot(
        title="Bytes on the wire over accumulation",
        caption=f"Counted where the collectives ran. Dotted: {_EVERY}. "
        f"{_constant_of_saving(list(lines.lines.values()))} "
        f"Runs on one worker send nothing, and are left out.{lines.hint}",
        data=every + sent,
        layout=lines.form("MB on the wire a step, one rank"),
    )


def _speedup(lines: Lines) -> Plot:
    def speedup(row: Row) -> float | None:
        return row.measured.speedup_95.value if row.measured and row.measured.speedup_95 else None

    data = lines.traces(speedup, "%{y:.3f}× as fast")
    if len(data) == 1:
        data[0]["name"] = "measured speed-up"
    form = lines.form("times as fast as sync=every")
    form["shapes"] = [level(1)]
    return Plot(
        title="Measured speed-up over accumulation",
        caption="Median step, with what its passes take longer when every micro-batch is synchronised, by the median "
        f"step: measured on the run itself, before training. Accumulation 1 has nothing to skip.{lines.hint}",
        data=data,
        layout=form,
    )


def _accumulation(row: Row) -> int:
    return row.facts.accumulation if row.facts else 0


def _constant_of_saving(lines: Sequence[Sequence[Row]]) -> str:
    """Return a sentence on which batch size is constant along each line."""
    facts = [[row.facts for row in line if row.facts] for line in lines]
    sizes = {each.global_size for line in facts for each in line}
    if all(len({each.global_size for each in line}) == 1 for line in facts):
        return (
            f"The global batch is constant{f' ({sizes.pop():,} samples)' if len(sizes) == 1 else ' along each line'}."
        )
    if all(len({each.micro_size for each in line}) == 1 for line in facts):
        return "The micro-batch is constant: the global batch grows with accumulation."
    return "Neither the global batch nor the micro-batch is constant along the lines."


def over_workers(group: TaskGroup, style: Style) -> list[Plot]:
    """Return the plots over the number of workers; none if all runs have equally many."""
    rows = [row for row in group.rows if row.samples_per_s is not None and row.facts]
    if len({_world(row) for row in rows}) < 2:
        return []
    who = "workers" if group.hours == "worker-hours" else "GPUs"
    keys = compare.over_workers([row.facts for row in rows if row.facts])
    lines = Lines.of(group, style, rows, keys, _world, f"{who} (world size)")
    speed = Plot(
        title=f"Speed over {who}",
        caption=f"Global batch / median step. Dotted: in proportion to the fewest {who}. "
        f"{_constant_of_scaling(list(lines.lines.values()))}{lines.hint}",
        data=lines.traces(lambda row: row.samples_per_s, "%{y:,.1f} samples/s") + _ideal(lines),
        layout=lines.form("samples/s, whole job"),
    )
    compared = [row.efficiency.value for row in rows if row.efficiency]
    if not compared:
        return [speed]
    form = lines.form("scaling efficiency, %")
    form["shapes"] = [level(100)]
    form["yaxis"]["range"] = [0, max(110, 108 * max(compared))]
    efficiency = Plot(
        title=f"Scaling efficiency over {who}",
        caption=f"samples/s on W {who}, by W/W0 × samples/s on W0, the fewest of the same line. 100%: nothing lost."
        f"{lines.hint}",
        data=lines.traces(lambda row: 100 * row.efficiency.value if row.efficiency else None, "%{y:.1f}%"),
        layout=form,
    )
    return [speed, efficiency]


def _ideal(lines: Lines) -> list[dict[str, Any]]:
    """Return the lines of proportional scaling from each line's baseline."""
    data: list[dict[str, Any]] = []
    for line in lines.lines.values():
        base = [row for row in line if row.efficiency and row.efficiency.baseline == _world(row)]
        if base:
            best = max(base, key=lambda row: row.samples_per_s or 0.0)
            worlds = sorted({_world(row) for row in line})
            data.append(
                {
                    "type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip", "opacity": 0.55,
                    "x": worlds, "y": [(best.samples_per_s or 0.0) * world / worlds[0] for world in worlds],
                    "line": {"color": lines.style.colour(best), "width": 1.2, "dash": "dot"},
                }
            )  # fmt: skip
    return data


def _world(row: Row) -> int:
    return row.facts.world_size if row.facts else 0


def _constant_of_scaling(lines: Sequence[Sequence[Row]]) -> str:
    """Return a sentence on which batch size is constant along each line."""
    facts = [[row.facts for row in line if row.facts] for line in lines]
    sizes = {each.global_size for line in facts for each in line}
    if all(len({each.global_size for each in line}) == 1 for line in facts):
        how = f" ({sizes.pop():,} samples)" if len(sizes) == 1 else " along each line"
        return f"The global batch is constant{how}: strong scaling."
    if all(len({each.global_size // each.world_size for each in line}) == 1 for line in facts):
        return "The batch of a worker is constant, and the global batch grows with them: weak scaling."
    return "Neither the global batch nor a worker's share of it is constant along the lines."


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
    """Return a sentence on the range of final losses, because overlapping curves hide each other."""
    last = [row.measured.smoothed for row in group.rows if row.done and row.measured and row.measured.smoothed]
    if len(last) < 2:
        return ""
    return f"The {len(last)} finished runs end between {min(last):.4f} and {max(last):.4f} (smoothed). "
