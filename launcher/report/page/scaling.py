"""Speed and scaling efficiency over the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.report.comparison import series
from launcher.report.comparison.compare import Row, TaskGroup
from launcher.report.page.lines import Lines
from launcher.report.page.plot import Plot, level
from launcher.report.page.style import Style


def over_workers(group: TaskGroup, style: Style) -> list[Plot]:
    """None where all runs have as many workers."""
    rows = [row for row in group.rows if row.samples_per_s is not None and row.facts]
    if len({_world(row) for row in rows}) < 2:
        return []
    who = "workers" if group.hours == "worker-hours" else "GPUs"
    keys = series.over_workers([row.facts for row in rows if row.facts])
    lines = Lines.of(group, style, rows, keys, _world, f"{who} (world size)")
    speed = Plot(
        title=f"Speed over {who}",
        caption=f"Global batch / median step. Dotted: in proportion to the fewest {who}. "
        f"{_constant(list(lines.lines.values()))}{lines.hint}",
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
    """What the speed of each line's baseline comes to on more workers."""
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


def _constant(lines: Sequence[Sequence[Row]]) -> str:
    """What stays the same along each of these lines."""
    facts = [[row.facts for row in line if row.facts] for line in lines]
    sizes = {each.global_size for line in facts for each in line}
    if all(len({each.global_size for each in line}) == 1 for line in facts):
        how = f" ({sizes.pop():,} samples)" if len(sizes) == 1 else " along each line"
        return f"The global batch is constant{how}: strong scaling."
    if all(len({each.global_size // each.world_size for each in line}) == 1 for line in facts):
        return "The batch of a worker is constant, and the global batch grows with them: weak scaling."
    return "Neither the global batch nor a worker's share of it is constant along the lines."
