"""Plots with a line a series of runs: over the workers, and over accumulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from launcher.report import series
from launcher.report.compare import Row, TaskGroup
from launcher.report.plot import MANY, QUIET, Plot, hover_names, layout, level, mb, text
from launcher.report.series import Key
from launcher.report.style import Style


def over_workers(group: TaskGroup, style: Style) -> list[Plot]:
    rows = [row for row in group.rows if row.samples_per_s is not None and row.facts]
    worlds = sorted({row.facts.world_size for row in rows if row.facts})
    if len(worlds) < 2:
        return []
    keys = series.over_workers([row.facts for row in rows if row.facts])
    lines = _lines(rows, keys)
    size = _constant(list(lines.values()), "workers")
    who = "workers" if group.hours == "worker-hours" else "GPUs"
    speed = _line_plot(
        hover_names(group),
        lines,
        style,
        lambda row: row.facts and row.facts.world_size,
        lambda row: row.samples_per_s,
        "%{y:,.1f} samples/s",
    )
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
            caption=f"Global batch / median step. Dotted: in proportion to the fewest {who}. {size}{_unnamed(lines)}",
            data=speed,
            layout=_log_x(layout(f"{who} (world size)", "samples/s, whole job", legend=len(lines) <= MANY), worlds),
        )
    ]
    compared = [row for row in rows if row.efficiency]
    if compared:
        kept = {key: [row for row in line if row.efficiency] for key, line in lines.items()}
        kept = {key: line for key, line in kept.items() if line}
        data = _line_plot(
            hover_names(group), kept, style, lambda row: row.facts and row.facts.world_size,
            lambda row: row.efficiency and 100 * row.efficiency.value, "%{y:.1f}%",
        )  # fmt: skip
        form = layout(f"{who} (world size)", "scaling efficiency, %", legend=len(lines) <= MANY)
        form["shapes"] = [level(100)]
        highest = max(row.efficiency.value for row in compared if row.efficiency)
        form["yaxis"]["range"] = [0, max(110, 108 * highest)]
        found.append(
            Plot(
                title=f"Scaling efficiency over {who}",
                caption=f"samples/s on W {who}, by W/W0 × samples/s on W0, the fewest of the same line. "
                "100%: nothing lost.",
                data=data,
                layout=_log_x(form, worlds),
            )
        )
    return found


def over_accumulation(group: TaskGroup, style: Style) -> list[Plot]:
    rows = [
        row for row in group.rows if row.facts and row.facts.world_size > 1 and row.measured and row.measured.windows
    ]
    counts = sorted({row.facts.accumulation for row in rows if row.facts})
    if len(counts) < 2:
        return []
    lines = _lines(rows, series.over_accumulation([row.facts for row in rows if row.facts]))
    size = _constant(list(lines.values()), "accumulation")
    few = len(lines) <= MANY
    at: Callable[[Row], Any] = lambda row: row.facts and row.facts.accumulation  # noqa: E731
    sent = _line_plot(
        hover_names(group),
        lines,
        style,
        at,
        lambda row: mb(row.measured and row.measured.wire_bytes),
        "%{y:,.2f} MB as run",
        neutral=True,
    )
    every = _line_plot(
        hover_names(group),
        lines,
        style,
        at,
        lambda row: mb(row.measured and row.measured.wire_bytes_every),
        "%{y:,.2f} MB with sync=every",
        neutral=True,
    )
    for trace in every:
        trace["name"] = (
            "with every micro-batch synchronised" if len(lines) == 1 else f"{trace['name']}: every micro-batch"
        )
        trace["line"] = {"color": QUIET, "width": 1.6, "dash": "dot"}
        trace["marker"] = {"color": QUIET, "size": 6}
    if len(lines) == 1:
        sent[0]["name"] = "as run"
    form = _log_x(
        layout("accumulation (micro-batches a worker and step)", "MB on the wire a step, one rank", legend=few), counts
    )
    found = [
        Plot(
            title="Bytes on the wire over accumulation",
            caption=f"Counted where the collectives ran. Dotted: had every micro-batch been synchronised. {size} "
            f"Runs on one worker send nothing, and are left out.{_unnamed(lines)}",
            data=sent + every,
            layout=form,
        )
    ]
    timed = {key: [row for row in line if row.measured and row.measured.speedup] for key, line in lines.items()}
    timed = {key: line for key, line in timed.items() if line}
    if timed:
        data = _line_plot(
            hover_names(group),
            timed,
            style,
            at,
            lambda row: row.measured and row.measured.speedup,
            "%{y:.3f}× as fast",
            neutral=True,
        )
        if len(timed) == 1:
            data[0]["name"] = "measured speed-up"
        form = _log_x(
            layout("accumulation (micro-batches a worker and step)", "times as fast as sync=every", legend=few), counts
        )
        form["shapes"] = [level(1)]
        found.append(
            Plot(
                title="Measured speed-up over accumulation",
                caption="Median step with every micro-batch synchronised, by the median step with the job's own "
                "policy: both measured on early windows of the run itself. Accumulation 1 has nothing to skip.",
                data=data,
                layout=form,
            )
        )
    return found


def _lines(rows: Sequence[Row], keys: Sequence[Key]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = defaultdict(list)
    for row, key in zip(rows, keys, strict=True):
        found[key].append(row)
    return dict(sorted(found.items(), key=lambda item: series.natural(series.said(item[0]))))


def _line_plot(
    hovers: dict[int, str],
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
                "text": [hovers[id(row)] for row in ordered],
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
    form["xaxis"] |= {
        "type": "log",
        "tickvals": list(ticks),
        "ticktext": [str(tick) for tick in ticks],
        "minor": {"ticks": ""},
    }
    form["yaxis"]["rangemode"] = "tozero"
    return form


def _unnamed(lines: dict[Key, list[Row]]) -> str:
    return " Hover for the names." if len(lines) > MANY else ""
