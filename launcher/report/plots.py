"""The plots of one task's runs, as plotly takes them: plain JSON. Nothing in them is averaged over runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.report import series
from launcher.report.compare import Row, TaskGroup
from launcher.report.curve import Curve
from launcher.report.series import Key
from launcher.report.style import QUIET, Style, layout, names, text

# more lines than this are told apart by the pointer, not by a legend; more bars have no room for names
MANY = 14
MANY_BARS = 32

_PARTS = {"compute": "#44576f", "communication that shows": "#e8710a", "waiting for data": "#f2c14e"}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """``choices``: buttons; each names the visible traces' other x columns, or which traces show."""

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    choices: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def plots(group: TaskGroup) -> list[Plot]:
    style = Style(group.rows)
    made = [
        step_split(group), *over_workers(group, style), *over_accumulation(group, style), loss(group, style),
        hours(group, style),
    ]  # fmt: skip
    return [plot for plot in made if plot is not None]


def step_split(group: TaskGroup) -> Plot | None:
    rows = [row for row in group.rows if row.measured and row.measured.step_s is not None]
    if not rows:
        return None
    split = [row for row in rows if row.exposed_s is not None]
    whole = [row for row in rows if row.exposed_s is None]
    called, flat = names(group), len(rows) <= MANY_BARS
    parts: list[tuple[str, list[Row], Callable[[Row], float | None], dict[str, Any]]] = [
        ("compute", split, lambda row: row.rest_s, {"color": _PARTS["compute"]}),
        (
            "compute and communication, not told apart", whole, lambda row: row.rest_s,
            {"color": "#8b9bb0", "pattern": {"shape": "/", "fgcolor": "#ffffff", "size": 6}},
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
        along, values = [place[id(row)] for row in which], [_ms(part(row)) for row in which]
        data.append(
            {
                "type": "bar", "name": name, "orientation": "h" if flat else "v", "marker": {**marker, "line": {"width": 0}},
                "x": values if flat else along, "y": along if flat else values,
                "text": [called[id(row)] for row in which], "textposition": "none",
                "hovertemplate": f"%{{text}}<br>{name}: %{{{'x' if flat else 'y'}:.4g}} ms<extra></extra>",
            }
        )  # fmt: skip
    form = layout("ms a step (median)", "", height=130 + 26 * len(rows) if flat else 420)
    form |= {"barmode": "stack", "bargap": 0.28 if flat else 0.1}
    form["legend"] = form["legend"] | {"traceorder": "normal"}
    if flat:
        ticks = {"tickvals": list(range(len(rows))), "ticktext": [called[id(row)] + "  " for row in rows]}
        form["yaxis"] |= {"autorange": "reversed", "showgrid": False, "title": {"text": ""}, **ticks}
    else:
        form["xaxis"], form["yaxis"] = form["yaxis"], form["xaxis"]
        form["xaxis"] |= {"showticklabels": False, "title": {"text": "runs, in the order of the table: hover for names"}}
    caption = "Communication shows where a step takes longer than the same micro-batches without any collective."
    if whole:
        caption += " Hatched: this was not measured, so computation and communication are one bar."
    return Plot(title="Where the time of a step goes", caption=caption, data=data, layout=form, wide=True)


def over_workers(group: TaskGroup, style: Style) -> list[Plot]:
    rows = [row for row in group.rows if row.samples_per_s is not None and row.facts]
    worlds = sorted({row.facts.world_size for row in rows if row.facts})
    if len(worlds) < 2:
        return []
    keys = series.over_workers([row.facts for row in rows if row.facts])
    lines = _lines(rows, keys)
    size = _constant(list(lines.values()), "workers")
    who = "workers" if group.hours == "worker-hours" else "GPUs"
    speed = _line_plot(lines, style, lambda row: row.facts and row.facts.world_size, lambda row: row.samples_per_s, "%{y:,.1f} samples/s")
    for line in lines.values():  # what the smallest world's speed would come to
        base = [row for row in line if row.efficiency and row.facts and row.facts.world_size == row.efficiency.baseline]
        if base:
            best = max(base, key=lambda row: row.samples_per_s or 0.0)
            assert best.facts is not None
            mine = sorted({row.facts.world_size for row in line if row.facts})
            ideal = [(best.samples_per_s or 0.0) * world / best.facts.world_size for world in mine]
            speed.append(
                {
                    "type": "scatter", "mode": "lines", "x": mine, "y": ideal, "showlegend": False, "hoverinfo": "skip",
                    "line": {"color": style.colour(best), "width": 1.2, "dash": "dot"}, "opacity": 0.55,
                }
            )  # fmt: skip
    found = [
        Plot(
            title=f"Speed over {who}",
            caption=f"Global batch / median step. Dotted: in proportion to the fewest {who}. {size}",
            data=speed,
            layout=_log_x(layout(f"{who} (world size)", "samples/s, whole job", legend=len(lines) <= MANY), worlds),
        )
    ]
    compared = [row for row in rows if row.efficiency]
    if compared:
        kept = {key: [row for row in line if row.efficiency] for key, line in lines.items()}
        data = _line_plot(
            {key: line for key, line in kept.items() if line}, style, lambda row: row.facts and row.facts.world_size,
            lambda row: row.efficiency and 100 * row.efficiency.value, "%{y:.1f}%",
        )  # fmt: skip
        form = layout(f"{who} (world size)", "scaling efficiency, %", legend=len(lines) <= MANY)
        form["shapes"] = [_level(100)]
        highest = max(row.efficiency.value for row in compared if row.efficiency)
        form["yaxis"]["range"] = [0, max(110, 108 * highest)]
        found.append(
            Plot(
                title=f"Scaling efficiency over {who}",
                caption=f"samples/s on W {who}, by W/W0 × samples/s on W0, the fewest of the same line. 100%: nothing lost.",
                data=data,
                layout=_log_x(form, worlds),
            )
        )
    return found


def over_accumulation(group: TaskGroup, style: Style) -> list[Plot]:
    rows = [row for row in group.rows if row.facts and row.facts.world_size > 1 and row.measured and row.measured.windows]
    counts = sorted({row.facts.accumulation for row in rows if row.facts})
    if len(counts) < 2:
        return []
    lines = _lines(rows, series.over_accumulation([row.facts for row in rows if row.facts]))
    size = _constant(list(lines.values()), "accumulation")
    few = len(lines) <= MANY
    at: Callable[[Row], Any] = lambda row: row.facts and row.facts.accumulation  # noqa: E731
    sent = _line_plot(lines, style, at, lambda row: _mb(row.measured and row.measured.wire_bytes), "%{y:,.2f} MB as run", neutral=True)
    every = _line_plot(lines, style, at, lambda row: _mb(row.measured and row.measured.wire_bytes_every), "%{y:,.2f} MB with sync=every", neutral=True)
    for trace in every:
        trace["name"] = "with every micro-batch synchronised" if len(lines) == 1 else f"{trace['name']}: every micro-batch"
        trace["line"] = {"color": QUIET, "width": 1.6, "dash": "dot"}
        trace["marker"] = {"color": QUIET, "size": 6}
    if len(lines) == 1:
        sent[0]["name"] = "as run"
    form = _log_x(layout("accumulation (micro-batches a worker and step)", "MB on the wire a step, one rank", legend=few), counts)
    found = [
        Plot(
            title="Bytes on the wire over accumulation",
            caption=f"Counted where the collectives ran. Dotted: had every micro-batch been synchronised. {size} "
            "Runs on one worker send nothing, and are left out.",
            data=sent + every,
            layout=form,
        )
    ]
    timed = {key: [row for row in line if row.measured and row.measured.speedup] for key, line in lines.items()}
    timed = {key: line for key, line in timed.items() if line}
    if timed:
        data = _line_plot(timed, style, at, lambda row: row.measured and row.measured.speedup, "%{y:.3f}× as fast", neutral=True)
        if len(timed) == 1:
            data[0]["name"] = "measured speed-up"
        form = _log_x(layout("accumulation (micro-batches a worker and step)", "times as fast as sync=every", legend=few), counts)
        form["shapes"] = [_level(1)]
        found.append(
            Plot(
                title="Measured speed-up over accumulation",
                caption="Median step with every micro-batch synchronised, by the median step with the job's own policy: "
                "both measured on early windows of the run itself. With accumulation 1 there is nothing to skip.",
                data=data,
                layout=form,
            )
        )
    return found


def loss(group: TaskGroup, style: Style) -> Plot | None:
    called, few = names(group), len(group.rows) <= MANY
    data: list[dict[str, Any]] = []
    columns: dict[str, list[list[float]]] = {"steps": [], "samples": [], "wall time": []}
    held_out = any(row.measured and row.measured.held_out.steps for row in group.rows)
    for kind in ("training loss", "held-out loss") if held_out else ("training loss",):
        for row in group.rows:
            if row.measured is None:
                continue
            curve: Curve = row.measured.curve if kind == "training loss" else row.measured.held_out
            if not curve.steps:
                continue
            for column, values in zip(columns.values(), (curve.steps, curve.samples, curve.seconds), strict=True):
                column.append([_short(value) for value in values])
            data.append(
                {
                    "type": "scatter", "mode": "lines" if kind == "training loss" else "lines+markers",
                    "name": called[id(row)], "meta": kind, "visible": kind == "training loss",
                    "x": columns["steps"][-1], "y": [None if value != value else _short(value) for value in curve.losses],
                    "line": {"color": style.colour(row), "dash": style.dash(row), "width": 1.8 if few else 1},
                    "opacity": 0.95 if few else 0.6, "connectgaps": False,
                    "text": called[id(row)],
                    "hovertemplate": f"%{{text}}<br>{kind} %{{y:.4f}} at %{{x:,.6g}}<extra></extra>",
                }
            )  # fmt: skip
    if not data:
        return None
    form = layout("optimizer steps", "training loss (mean over the step's items)", height=500, legend=few)
    if group.loss is not None:
        form["shapes"] = [_level(group.loss)]
        form["annotations"] = [_said_at(group.loss, f"{group.loss:.4g}: hours are counted to it")]
    titles = {"steps": "optimizer steps", "samples": "samples seen", "wall time": "wall seconds of training"}
    return Plot(
        title="Loss",
        caption=f"{style.said} Long records are drawn with the lowest and the highest loss of each stretch, so that no "
        "spike is hidden." + ("" if few else " Hover for a run's name."),
        data=data,
        layout=form,
        wide=True,
        choices={name: {"x": values, "title": titles[name]} for name, values in columns.items()},
    )


def hours(group: TaskGroup, style: Style) -> Plot | None:
    if group.loss is None or not group.rows:
        return None
    rows, called = list(group.rows), names(group)
    flat = len(rows) <= MANY_BARS
    values = [0.0 if row.hours is None else row.hours * 3600 for row in rows]
    longest = max(values, default=0.0)
    unit, times = (("seconds", 1.0) if longest < 120 else ("minutes", 1 / 60)) if longest < 7200 else ("hours", 1 / 3600)
    heading = f"{group.hours.partition('-')[0]}-{unit}"
    sizes = [value * times for value in values]
    said = ["  not reached" if row.hours is None else f"  {size:.3g}" for row, size in zip(rows, sizes, strict=True)]
    hover = [
        f"{called[id(row)]}<br>" + ("not reached" if row.hours is None else f"{size:.4g} {heading}, at step {row.reached_step:,}")
        for row, size in zip(rows, sizes, strict=True)
    ]
    place = list(range(len(rows)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h" if flat else "v", "x": sizes if flat else place, "y": place if flat else sizes,
            "marker": {"color": [style.colour(row) for row in rows], "line": {"width": 0}},
            "text": said, "textposition": "outside" if flat else "none", "cliponaxis": False,
            "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>", "showlegend": False,
        }
    ]  # fmt: skip
    form = layout(f"{heading} to a training loss of {group.loss:.4g}", "", height=96 + 26 * len(rows) if flat else 380, legend=False)
    form["bargap"] = 0.28 if flat else 0.1
    if flat:
        ticks = {"tickvals": place, "ticktext": [called[id(row)] + "  " for row in rows]}
        form["yaxis"] |= {"autorange": "reversed", "showgrid": False, "title": {"text": ""}, **ticks}
        form["xaxis"]["range"] = [0, 1.15 * max(sizes) or 1]
    else:
        form["xaxis"], form["yaxis"] = form["yaxis"], form["xaxis"]
        form["xaxis"] |= {"showticklabels": False, "title": {"text": "runs, in the order of the table: hover for names"}}
    which = "the loss that was asked for" if group.given else "the lowest that every finished run of this task has reached"
    caption = f"Workers × wall time until the smoothed training loss was {group.loss:.4g} or lower: {which}."
    return Plot(title=f"{group.hours[0].upper()}{group.hours[1:]} to a loss", caption=caption, data=data, layout=form, wide=True)


def _lines(rows: Sequence[Row], keys: Sequence[Key]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = defaultdict(list)
    for row, key in zip(rows, keys, strict=True):
        found[key].append(row)
    return dict(sorted(found.items(), key=lambda item: series.natural(series.said(item[0]))))


def _line_plot(
    lines: dict[Key, list[Row]],
    style: Style,
    x: Callable[[Row], Any],
    y: Callable[[Row], Any],
    hover: str,
    *,
    neutral: bool = False,
) -> list[dict[str, Any]]:
    """A line a series; a hollow point is a run that is not finished. ``neutral``: the points have the colours of their
    settings, and the lines only dashes."""
    data: list[dict[str, Any]] = []
    for number, (key, line) in enumerate(lines.items()):
        ordered = sorted(line, key=lambda row: (x(row), y(row)))
        colours = [style.colour(row) for row in ordered]
        stroke = {"color": "#475569", "dash": style.dash_of(number)} if neutral else {"color": colours[0]}
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": text(series.said(key)) or "all runs",
                "x": [x(row) for row in ordered], "y": [y(row) for row in ordered],
                "line": {**stroke, "width": 2},
                "marker": {
                    "size": 9, "color": colours if neutral else colours[0],
                    "symbol": ["circle" if row.done else "circle-open" for row in ordered],
                },
                "text": [text(row.entry.label if row.done else f"{row.entry.label} ({row.entry.state})") for row in ordered],
                "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
            }
        )  # fmt: skip
    return data


def _constant(lines: Sequence[Sequence[Row]], along: str) -> str:
    """What stays the same along each of these lines."""
    facts = [[row.facts for row in line if row.facts] for line in lines]
    sizes = {each.global_size for line in facts for each in line}
    if all(len({each.global_size for each in line}) == 1 for line in facts):
        how = f"{sizes.pop():,} samples" if len(sizes) == 1 else "along each line"
        return f"The global batch is constant ({how})" + ("." if along == "accumulation" else ": strong scaling.")
    if along == "workers" and all(len({each.global_size // each.world_size for each in line}) == 1 for line in facts):
        return "The batch of a worker is constant, the global batch grows with them: weak scaling."
    if along == "accumulation" and all(len({each.micro_size for each in line}) == 1 for line in facts):
        return "The micro-batch is constant: the global batch grows with accumulation."
    return "Neither the global batch nor a worker's share of it is constant along the lines."


def _log_x(form: dict[str, Any], ticks: Sequence[int]) -> dict[str, Any]:
    """Doublings are equally far apart, and only what was run has a tick."""
    form["xaxis"] |= {"type": "log", "tickvals": list(ticks), "ticktext": [str(tick) for tick in ticks], "minor": {"ticks": ""}}
    form["yaxis"]["rangemode"] = "tozero"
    return form


def _level(value: float) -> dict[str, Any]:
    line = {"color": "#64748b", "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line, "layer": "below"}


def _said_at(value: float, words: str) -> dict[str, Any]:
    font = {"size": 12, "color": "#64748b"}
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "y": value, "yanchor": "top", "text": words, "showarrow": False,
        "font": font,
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _short(1e3 * seconds)


def _mb(number: float | None) -> float | None:
    return None if number is None else number / 1e6


def _short(value: float) -> float:
    """Six digits: more cannot be seen, and the page carries each of them."""
    return float(f"{value:.6g}")
