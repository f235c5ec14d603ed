"""Bytes on the wire, and the speed-up that leaving them out was measured to bring, over accumulation."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.comparison import series
from launcher.report.comparison.compare import Row, TaskGroup
from launcher.report.page.lines import Lines
from launcher.report.page.plot import QUIET, Plot, level, mb
from launcher.report.page.style import Style

_EVERY = "had every micro-batch been synchronised"


def over_accumulation(group: TaskGroup, style: Style) -> list[Plot]:
    """Of runs on several workers; none where all of them accumulate as much."""
    rows = [row for row in group.rows if row.facts and row.facts.world_size > 1 and row.measured]
    rows = [row for row in rows if row.measured and row.measured.windows]
    if len({_accumulation(row) for row in rows}) < 2:
        return []
    keys = series.over_accumulation([row.facts for row in rows if row.facts])
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
    for number, trace in enumerate(every):  # one name for all of them
        trace |= {"name": _EVERY, "legendgroup": "every", "showlegend": number == 0}
        trace |= {"line": {"color": QUIET, "width": 1.6, "dash": "dot"}, "marker": {"color": QUIET, "size": 6}}
    return Plot(
        title="Bytes on the wire over accumulation",
        caption=f"Counted where the collectives ran. Dotted: {_EVERY}. {_constant(list(lines.lines.values()))} "
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


def _constant(lines: Sequence[Sequence[Row]]) -> str:
    """What stays the same along each of these lines."""
    facts = [[row.facts for row in line if row.facts] for line in lines]
    sizes = {each.global_size for line in facts for each in line}
    if all(len({each.global_size for each in line}) == 1 for line in facts):
        return (
            f"The global batch is constant{f' ({sizes.pop():,} samples)' if len(sizes) == 1 else ' along each line'}."
        )
    if all(len({each.micro_size for each in line}) == 1 for line in facts):
        return "The micro-batch is constant: the global batch grows with accumulation."
    return "Neither the global batch nor the micro-batch is constant along the lines."
