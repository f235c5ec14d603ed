"""Plots of one task's runs in plotly's format. Nothing is averaged over runs."""

from __future__ import annotations

import html
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.extensions.page import compare
from launcher.extensions.page.compare import Key, Row, TaskGroup, agree, natural_sort_key, settings_text
from launcher.quantities import count
from launcher.record.measurements import SMOOTHED_OVER, fewer_points, rounded

_COLOURS = (
    "#2563eb", "#e8710a", "#16935a", "#c62f4b", "#7c4dcc", "#0e8fa8", "#b8860b", "#d1529b", "#6b4f3a", "#556070",
)  # fmt: skip
# plotly's name of a dash, and its description in a caption
_DASHES = {
    "solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted", "longdash": "long dashes",
    "longdashdot": "long dash-dots",
}  # fmt: skip
# above these numbers of curves and lines, they are identified by hovering instead of a legend or label
_MAX_CURVES, _MAX_LINES = 14, 9
# points of all curves of a kind; a page of many runs stays small
_ALL_POINTS, _FEWEST_POINTS = 9000, 48
_EVERY = "if every micro-batch were synchronised"
_AXES = {"smoothed": "training loss, smoothed"}

# visible on white and on black
_NEUTRAL = "#7c8aa0"
# above this number of bars, they are identified by hovering instead of a label
_MAX_BARS = 32


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


def _escape(text: str) -> str:
    """Escape text for use inside a plot, where plotly would interpret some markup."""
    return html.escape(text).replace("%{", "%&#123;")


def _axes_layout(x: str, y: str, *, height: int = 380, legend: bool = True) -> dict[str, Any]:
    """Return a layout with the axes' names and units; page.js has what all layouts share."""
    return {
        "height": height, "showlegend": legend, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
    }  # fmt: skip


def _bar_layout(rows: Sequence[Row], axis: str, *, legend: bool) -> dict[str, Any]:
    """Return the layout of horizontal bars, the first on top, labelled with the runs' names if there is room."""
    labelled = len(rows) <= _MAX_BARS
    height = 96 + 34 * legend + (26 * len(rows) if labelled else 600)
    side = "" if labelled else "runs in the order of the table; hover for names"
    layout = _axes_layout(axis, side, height=height, legend=legend)
    layout |= {"barmode": "stack", "bargap": 0.28 if labelled else 0.1}
    layout["yaxis"] |= {
        "autorange": "reversed", "showgrid": False, "zeroline": False, "showticklabels": labelled,
        "tickvals": list(range(len(rows))), "ticktext": [f"{_escape(row.name)}  " for row in rows],
    }  # fmt: skip
    return layout


def plots(group: TaskGroup) -> list[Plot]:
    style, timed = _Style(group.rows), replace(group, rows=tuple(row for row in group.rows if row.ran_alone))
    lines = [*_over_workers(timed, style), *_over_accumulation(group, style)]
    return [*_step_split(timed), *lines, _loss(group, style), *_cost(timed, style)]


class _Style:
    """Colours and dashes of one task's runs. If runs differ only in the workers, colours stand for the workers."""

    def __init__(self, rows: Sequence[Row]) -> None:
        lines = compare.lines_over_workers(rows)
        self._worlds = sorted({row["batch/world_size"] for row in rows})
        self._by_world = len(lines) == 1
        if self._by_world:
            lines = {world: [row for row in rows if row["batch/world_size"] == world] for world in self._worlds}
        colours = _COLOURS
        if len(lines) > len(colours):
            hues = [(223 - 331 * number / len(lines)) % 360 for number in range(len(lines))]
            colours = [f"hsl({hue:.0f}, 62%, 42%)" for hue in hues]
        self._colours = {row: colour for line, colour in zip(lines.values(), colours, strict=False) for row in line}

    def colour(self, row: Row) -> str:
        return self._colours[row]

    def dash(self, row: Row) -> str:
        return "solid" if self._by_world else _dash(self._worlds.index(row["batch/world_size"]))

    @property
    def caption(self) -> str:
        """Return the explanation of colours and dashes."""
        if len(self._colours) == 1:
            return ""
        if self._by_world:
            return "One colour per number of workers, the same in all plots."
        if len(self._worlds) == 1:
            return "One colour per configuration, the same in all plots."
        dashes = zip(_DASHES.values(), self._worlds, strict=False)
        lines = ", ".join(f"{dash}: {count(world, 'worker')}" for dash, world in dashes)
        return f"One colour per setting, the same in all plots; {lines}."


def _dash(number: int) -> str:
    return list(_DASHES)[number % len(_DASHES)]


def _level(value: float) -> dict[str, Any]:
    """Return a horizontal dashed line."""
    line = {"color": _NEUTRAL, "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line, "layer": "below"}


def _step_split(group: TaskGroup) -> list[Plot]:
    rows = [row for row in group.rows if row["time/step_s"] is not None]
    if not rows:
        return []
    split = [row for row in rows if row["comm/exposed_s"] is not None]
    unsplit = [row for row in rows if row["comm/exposed_s"] is None]
    parts = [
        ("compute", "#5b7a9d", {row: row["time/compute_s"] for row in split}),
        (
            "compute and communication, not separated", "#a9b8cc",
            {row: row["time/step_s"] - row["time/data_s"] for row in unsplit},
        ),
        ("exposed communication", "#e8710a", {row: max(0.0, row["comm/exposed_s"]) for row in split}),
        ("waiting for data", "#f2c14e", {row: row["time/data_s"] for row in rows}),
    ]  # fmt: skip
    place = {row: number for number, row in enumerate(rows)}
    data = [
        {
            "type": "bar", "name": name, "orientation": "h", "marker": {"color": colour, "line": {"width": 0}},
            "x": rounded(None if seconds is None else 1e3 * seconds for seconds in values.values()),
            "y": [place[row] for row in values],
            "text": [_escape(group.describe(row)) for row in values], "textposition": "none",
            "hovertemplate": f"%{{text}}<br>{name}: %{{x:.4g}} ms<extra></extra>",
        }
        for name, colour, values in parts
        if values
    ]  # fmt: skip
    caption = "Exposed communication: how much longer a step takes than the same micro-batches without any collective."
    if unsplit:
        caption += " Pale bars: it was not measured, so compute and communication are one bar."
    layout = _bar_layout(rows, "ms per step (median)", legend=True)
    return [Plot(title="Where the time of a step goes", caption=caption, data=data, layout=layout, wide=True)]


def _cost(group: TaskGroup, style: _Style) -> list[Plot]:
    if group.loss is None or not group.rows:
        return []
    unit, factor = group.time_unit
    costs = {row: None if row["loss/hours"] is None else row["loss/hours"] * factor for row in group.rows}
    hover = [
        f"{_escape(group.describe(row))}<br>"
        + ("not reached" if cost is None else f"{cost:.4g} {unit}, at step {row['loss/step']:,}")
        for row, cost in costs.items()
    ]
    layout = _bar_layout(group.rows, f"{unit} to a training loss of {group.loss:.4g}", legend=False)
    layout["xaxis"]["range"] = [0, 1.15 * max(cost or 0 for cost in costs.values()) or 1]
    which = (
        "the loss given by --loss"
        if group.loss_given
        else "the lowest loss that every finished run of the task reached"
    )
    bars = {
        "type": "bar", "orientation": "h", "showlegend": False, "cliponaxis": False,
        "x": [cost or 0.0 for cost in costs.values()], "y": list(range(len(costs))),
        "marker": {"color": [style.colour(row) for row in costs], "line": {"width": 0}},
        "text": ["  not reached" if cost is None else f"  {cost:.3g}" for cost in costs.values()],
        "textposition": "outside" if len(costs) <= _MAX_BARS else "none",
        "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip
    title = f"{unit[0].upper()}{unit[1:]} to a loss"
    caption = f"Workers × wall time until the smoothed training loss was first {group.loss:.4g} or lower ({which})."
    return [Plot(title=title, caption=caption, data=[bars], layout=layout, wide=True)]


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """Runs over the figure ``x``, one line for each key.

    Attributes:
        neutral: lines differ only in dashes; points have the colours of the settings, which change along a line.
    """

    group: TaskGroup
    style: _Style
    lines: dict[Key, list[Row]]
    x: str
    axis: str
    neutral: bool = False

    @property
    def hint(self) -> str:
        return "" if len(self.lines) <= _MAX_LINES else " Hover for the names."

    def traces(self, y: str, hover: str, factor: float = 1) -> list[dict[str, Any]]:
        """Return one trace per line of the runs that have the figure ``y``; hollow: unfinished."""
        data: list[dict[str, Any]] = []
        for number, (key, line) in enumerate(self.lines.items()):
            rows = [row for row in line if row[y] is not None]
            rows.sort(key=lambda row: (row[self.x], row[y]))
            if not rows:
                continue
            colours = [self.style.colour(row) for row in rows]
            stroke = {"color": _NEUTRAL, "dash": _dash(number)} if self.neutral else {"color": colours[0]}
            data.append(
                {
                    "type": "scatter", "mode": "lines+markers",
                    "name": _escape(compare.settings_text(key)) or "all runs",
                    "x": [row[self.x] for row in rows], "y": [row[y] * factor for row in rows],
                    "line": {**stroke, "width": 2},
                    "marker": {
                        "size": 9, "color": colours if self.neutral else colours[0],
                        "symbol": ["circle" if row.done else "circle-open" for row in rows],
                    },
                    "text": [_escape(self.group.describe(row)) for row in rows],
                    "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
                }
            )  # fmt: skip
        return data

    def layout(self, y_axis: str, level: float | None = None) -> dict[str, Any]:
        """Return the layout: logarithmic x axis with ticks only at values that were run, y axis from zero."""
        layout = _axes_layout(self.axis, y_axis, legend=len(self.lines) <= _MAX_LINES)
        ticks = sorted({row[self.x] for line in self.lines.values() for row in line})
        layout["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}
        layout["yaxis"]["rangemode"] = "tozero"
        return layout | ({} if level is None else {"shapes": [_level(level)]})

    def same(self, value: Callable[[Row], float]) -> bool:
        """Return whether ``value`` is the same for all runs of each line."""
        return all(len({value(row) for row in line}) == 1 for line in self.lines.values())


def _over_accumulation(group: TaskGroup, style: _Style) -> list[Plot]:
    """Return the plots over accumulation for runs on several workers; none if all accumulate equally."""
    rows = [row for row in group.rows if row["batch/world_size"] > 1 and row["own_windows"]]
    if len({row["batch/accumulation"] for row in rows}) < 2:
        return []
    lines = _Lines(
        group=group, style=style, lines=compare.lines_over_accumulation(rows), x="batch/accumulation",
        axis="accumulation (micro-batches per worker and step)", neutral=True,
    )  # fmt: skip
    measured = {key: [row for row in line if row.speedup is not None] for key, line in lines.lines.items()}
    return [_wire(lines), *([_speedup(replace(lines, lines=measured))] if any(measured.values()) else [])]


def _wire(lines: _Lines) -> Plot:
    sent = lines.traces("comm/wire_bytes", "%{y:,.2f} MB, as run", 1e-6)
    every = lines.traces("comm/wire_bytes_every", f"%{{y:,.2f}} MB, {_EVERY}", 1e-6)
    if len(lines.lines) == 1:
        sent[0]["name"] = "as run"
    for number, trace in enumerate(every):  # all share one legend entry
        trace |= {"name": _EVERY, "legendgroup": "every", "showlegend": number == 0}
        trace |= {"line": {"color": _NEUTRAL, "width": 1.6, "dash": "dot"}, "marker": {"color": _NEUTRAL, "size": 6}}
    if lines.same(lambda row: row["batch/global_size"]):
        constant = "The global batch is constant along each line."
    elif lines.same(lambda row: row["batch/micro_size"]):
        constant = "The micro-batch is constant: the global batch grows with accumulation."
    else:
        constant = "Neither the global batch nor the micro-batch is constant along the lines."
    return Plot(
        title="Bytes on the wire over accumulation",
        caption=f"Counted as the collectives ran. Dotted: {_EVERY}. {constant} "
        f"Runs on one worker send nothing and are left out.{lines.hint}",
        data=every + sent,
        layout=lines.layout("MB on the wire per step, one rank"),
    )


def _speedup(lines: _Lines) -> Plot:
    data = lines.traces("comm/speedup", "%{y:.3f}× as fast")
    if len(data) == 1:
        data[0]["name"] = "measured speed-up"
    return Plot(
        title="Measured speed-up over accumulation",
        caption="Step time with sync=every divided by the run's own; the calibration before training measured the "
        f"difference. With accumulation 1 there is no communication to skip.{lines.hint}",
        data=data,
        layout=lines.layout("times as fast as sync=every", level=1),
    )


def _over_workers(group: TaskGroup, style: _Style) -> list[Plot]:
    """Return the plots over the number of workers; none if all runs have equally many."""
    rows = [row for row in group.rows if row["throughput/samples_per_s"] is not None]
    if len({row["batch/world_size"] for row in rows}) < 2:
        return []
    who = f"{group.worker}s"
    lines = _Lines(
        group=group, style=style, lines=compare.lines_over_workers(rows), x="batch/world_size",
        axis=f"{who} (world size)",
    )  # fmt: skip
    if lines.same(lambda row: row["batch/global_size"]):
        constant = "The global batch is constant along each line: strong scaling."
    elif lines.same(lambda row: row["batch/global_size"] / row["batch/world_size"]):
        constant = "The batch per worker is constant: weak scaling."
    else:
        constant = "Neither the global batch nor the batch per worker is constant along the lines."
    speed = Plot(
        title=f"Speed over {who}",
        caption=f"Global batch / median step. Dotted: perfect scaling from the fewest {who}. {constant}{lines.hint}",
        data=lines.traces("throughput/samples_per_s", "%{y:,.1f} samples/s") + _ideal(lines),
        layout=lines.layout("samples/s, whole job"),
    )
    compared = [row["scaling/efficiency"] for row in rows if row["scaling/efficiency"] is not None]
    if not compared:
        return [speed]
    layout = lines.layout("scaling efficiency, %", level=100)
    layout["yaxis"]["range"] = [0, max(110, 108 * max(compared))]
    efficiency = Plot(
        title=f"Scaling efficiency over {who}",
        caption=f"(samples/s on W {who}) / (W/W0 × samples/s on W0 {who}), with the fewest {who} of the line as W0. "
        f"100% is perfect scaling.{lines.hint}",
        data=lines.traces("scaling/efficiency", "%{y:.1f}%", 100),
        layout=layout,
    )
    return [speed, efficiency]


def _ideal(lines: _Lines) -> list[dict[str, Any]]:
    """Return the lines of proportional scaling from each line's baseline."""
    data: list[dict[str, Any]] = []
    for line in lines.lines.values():
        compared = sorted((row for row in line if row["scaling/efficiency"]), key=lambda row: row["batch/world_size"])
        if compared:
            ideal = {row[lines.x]: row["throughput/samples_per_s"] / row["scaling/efficiency"] for row in compared}
            data.append(
                {
                    "type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip", "opacity": 0.55,
                    "x": list(ideal), "y": list(ideal.values()),
                    "line": {"color": lines.style.colour(compared[0]), "width": 1.2, "dash": "dot"},
                }
            )  # fmt: skip
    return data


def _loss(group: TaskGroup, style: _Style) -> Plot:
    few = len(group.rows) <= _MAX_CURVES
    kinds = ("training loss", "smoothed", "held-out loss")
    curves = [
        (kind, row, fewer_points(columns, max(_FEWEST_POINTS, _ALL_POINTS // len(group.rows))))
        for kind in kinds
        for row in group.rows
        if (columns := row.data.curves[kind])
    ]
    data = [
        {
            "type": "scatter", "mode": "lines+markers" if kind == "held-out loss" else "lines",
            "name": _escape(row.name),
            "y": columns[3],
            "line": {"color": style.colour(row), "dash": style.dash(row), "width": 1.8 if few else 1},
            "opacity": 0.95 if few else 0.6, "connectgaps": False,
            "text": _escape(group.describe(row)),
            "hovertemplate": f"%{{text}}<br>{kind} %{{y:.4f}} at %{{x:,.6g}}<extra></extra>",
        }
        for kind, row, columns in curves
    ]  # fmt: skip
    layout = _axes_layout("optimizer steps", "training loss (mean over the step's items)", height=500, legend=few)
    if group.loss is not None:
        layout["shapes"] = [_level(group.loss)]
        layout["annotations"] = [
            {
                "xref": "paper", "x": 0, "xanchor": "left", "y": group.loss, "yanchor": "top", "showarrow": False,
                "text": f"{group.loss:.4g}: hours are counted up to here", "font": {"size": 12},
            }
        ]  # fmt: skip
    last = [row["train/loss_smoothed"] for row in group.rows if row.done and row["train/loss_smoothed"] is not None]
    caption = [
        style.caption,
        "Long curves show the lowest and the highest loss of each interval, so that no spike is hidden.",
        f"Smoothed: mean of the latest {SMOOTHED_OVER} logged losses.",
        # as text, because overlapping curves hide each other
        f"The {len(last)} finished runs end between {min(last):.4f} and {max(last):.4f} (smoothed)."
        if last[1:]
        else "",
        "" if few else "Hover for the names.",
    ]
    of_kind = {kind: [each == kind for each, *_ in curves] for kind in kinds}
    axes = {"steps": "optimizer steps", "samples": "samples seen", "wall time": "wall seconds of training"}
    shown = {
        kind: (
            {"visible": visible},
            {"yaxis.title.text": f"{_AXES.get(kind, kind)} (mean over items)", "yaxis.autorange": True},
        )
        for kind, visible in of_kind.items()
        if any(visible)
    }
    along = {
        name: ({"x": [columns[number] for *_, columns in curves]}, {"xaxis.title.text": title, "xaxis.autorange": True})
        for number, (name, title) in enumerate(axes.items())
    }
    return Plot(
        title="Loss",
        caption=" ".join(filter(None, caption)),
        data=data,
        layout=layout,
        wide=True,
        choices=(shown, along),
    )


# of the worst value, of the best, and of the numbers on both
_WORST, _BEST, _INK = "#eef2ff", "#7ea6fb", "#111827"
# most values of a setting, and most cells that are labelled
_MAX_VALUES, _MAX_LABELLED = 40, 80


def heat_maps(group: TaskGroup) -> list[Plot]:
    """Return step time, speed, loss and hours over two settings; none unless exactly two vary, apart from the seed."""
    rows = [row for row in group.rows if row.done]
    keys = compare.axes(rows, [compare.SEED])
    if len(keys) != 2:
        return []
    grid = _Grid.of(rows, keys)
    sizes = [len(values) for values in grid.values]
    if max(sizes) > _MAX_VALUES or len(grid.cells) <= max(sizes):  # not more cells than a line or a diagonal has
        return []
    held_out = all(row["eval/loss"] is not None for row in rows)
    loss = "eval/loss" if held_out else "train/loss_smoothed"
    to_loss = sum(row["loss/hours"] is not None for row in rows) > 1
    unit, factor = group.time_unit
    until = f" to a training loss of {group.loss:.4g}" if to_loss else ""
    plots = (
        grid.plot("Step time", "time/step_s", "ms", 1e3),
        grid.plot("Speed", "throughput/samples_per_s", "samples/s", higher=True),
        grid.plot("Held-out loss" if held_out else "Training loss", loss, one_colour=agree(rows, loss)),
        grid.plot(f"{unit[0].upper()}{unit[1:]}", f"{'loss' if to_loss else 'total'}/hours", f"{unit}{until}", factor),
    )
    return [plot for plot in plots if plot is not None]


@dataclass(frozen=True)
class _Grid:
    """Runs by the values of two settings, of which the first is on the horizontal axis.

    Attributes:
        keys: the settings.
        values: of each setting, in order.
        cells: runs by (value of the first setting, value of the second).
    """

    keys: Sequence[str]
    values: Sequence[Sequence[str]]
    cells: dict[tuple[str, ...], list[Row]]

    @classmethod
    def of(cls, rows: Sequence[Row], keys: Sequence[str]) -> _Grid:
        """Return the grid with the longer axis on the horizontal."""
        values = {key: {row.varied[key] for row in rows} for key in keys}
        keys = sorted(keys, key=lambda key: -len(values[key]))
        cells: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            cells[tuple(row.varied[key] for key in keys)].append(row)
        return cls(keys, [sorted(values[key], key=natural_sort_key) for key in keys], cells)

    def plot(
        self,
        title: str,
        figure: str,
        unit: str = "",
        factor: float = 1.0,
        *,
        higher: bool = False,
        one_colour: bool = False,
    ) -> Plot | None:
        """Return the heat map of one figure; None if fewer than two cells have it.

        Args:
            higher: a higher value is better.
            one_colour: the values differ by rounding only.
        """
        along, down = self.values
        grid = [[self._value(one, other, figure, factor) for one in along] for other in down]
        if sum(value is not None for line in grid for value in line) < 2:
            return None
        across, below = (_escape(settings_text(((key, ""),)).removesuffix("=")) for key in self.keys)
        labelled = len(along) * len(down) <= _MAX_LABELLED
        data = {
            "type": "heatmap", "x": [*map(_escape, along)], "y": [*map(_escape, down)], "z": grid, "xgap": 2, "ygap": 2,
            "colorscale": [[0, _WORST if higher else _BEST], [1, _BEST if higher else _WORST]],
            "showscale": not labelled, "texttemplate": "%{z:,.4~g}" if labelled else "", "textfont": {"color": _INK},
            "hovertemplate": f"{across} %{{x}}, {below} %{{y}}: %{{z:,.4~g}} {unit}<extra></extra>",
        }  # fmt: skip
        if one_colour:
            values = [value for line in grid for value in line if value is not None]
            data |= {"zmin": min(values) - 1, "zmax": max(values) + 1}
        layout = _axes_layout(across, below, height=150 + max(150, 34 * len(down)), legend=False)
        layout["xaxis"] |= {"type": "category", "showgrid": False}
        layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}
        unit_text = f"In {unit}. " if unit else ""
        median = (
            " A cell with several runs has their median." if any(len(rows) > 1 for rows in self.cells.values()) else ""
        )
        colours = "All agree within the rounding of their precision" if one_colour else "The bluer, the better"
        caption = f"{unit_text}{colours}. Empty: no finished run.{median}"
        return Plot(title=f"{title} over {across} and {below}", caption=caption, data=[data], layout=layout)

    def _value(self, along: str, down: str, figure: str, factor: float) -> float | None:
        known = [row[figure] * factor for row in self.cells.get((along, down), ()) if row[figure] is not None]
        return statistics.median(known) if known else None
