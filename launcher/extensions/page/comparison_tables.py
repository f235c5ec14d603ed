"""Comparison as tables of the terminal and of the page, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from launcher.extensions.page.answer import Finding
from launcher.extensions.page.compare import Row, RunComparison
from launcher.quantities import number_text
from launcher.report.run_list import COLOURS, LISTED
from launcher.report.tables import tracker_lines
from launcher.rundir.paths import RunPaths

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        short: heading in the terminal; "": only on the page.
        factor: from the figure's unit to the column's.
        form: format of a number; "": as in `number_text`.
    """

    figure: str
    heading: str
    unit: str
    short: str
    factor: float
    form: str

    def text(self, row: Row) -> str:
        """Return the row's value as text; "" if it is unknown."""
        value = row.figures[self.figure]
        if self.figure == "comm/speedup":
            return speedup_cell(row)
        if value is None:
            reachable = self.figure == "loss/hours" and row["loss/target"] is not None and row["step"] is not None
            return "not reached" if reachable else ""
        if self.figure == "comm/exposed_s":
            value = max(0.0, value)
        return format(value * self.factor, self.form) if self.form else number_text(value * self.factor)


# columns that are left out if no run has a value
_OPTIONAL = ("outer/step_bytes", "outer/step_s", "total/cost", "loss/cost")
# most metrics of the tasks' own losses in the terminal's table
MOST_METRICS = 4
COLUMNS = (
    Column("batch/world_size", "workers", "", "workers", 1, ",d"),
    Column("batch/global_size", "global batch", "samples", "batch", 1, ",d"),
    Column("batch/micro_size", "micro-batch", "samples", "micro", 1, ",d"),
    Column("batch/accumulation", "accumulation", "", "acc.", 1, ",d"),
    Column("step", "step", "", "step", 1, ",d"),
    Column("time/step_s", "step time", "ms", "ms/step", 1e3, ",.1f"),
    Column("time/compute_s", "compute", "ms", "", 1e3, ",.1f"),
    Column("comm/exposed_s", "exposed comm.", "ms", "exposed", 1e3, ",.1f"),
    Column("time/data_s", "data", "ms", "", 1e3, ",.2f"),
    Column("throughput/samples_per_s", "speed", "samples/s", "samples/s", 1, ",.1f"),
    Column("scaling/efficiency", "efficiency", "", "efficiency", 1, ".1%"),
    Column("comm/wire_bytes", "wire", "MB/step", "MB/step", 1e-6, ",.2f"),
    Column("comm/saved_fraction", "saved", "", "saved", 1, ".1%"),
    Column("outer/step_bytes", "between sites", "MB/step", "sites MB/step", 1e-6, ",.4f"),
    Column("outer/step_s", "outer steps", "ms/step", "outer ms/step", 1e3, ",.1f"),
    Column("comm/speedup", "speed-up", "×", "speed-up", 1, ".2f"),
    Column("train/loss_smoothed", "loss, smoothed", "", "loss", 1, ".4f"),
    Column("eval/loss", "held-out loss", "", "", 1, ".4f"),
    Column("total/hours", "{hours}", "", "", 1, ""),
    Column("total/cost", "price", "", "", 1, ""),
    Column("loss/hours", "{hours} to loss", "", "{hours} to loss", 1, ""),
    Column("loss/cost", "price to loss", "", "", 1, ""),
)


def columns_of(comparison: RunComparison) -> list[Column]:
    """Return the columns, those of the tasks' own metrics last. Of the own metrics, the terminal shows the held-out
    ones."""
    shown = [name for name in comparison.metrics if name.startswith("eval/") and "/loss" not in name][:MOST_METRICS]
    own = [Column(name, name, "", name if name in shown else "", 1, "") for name in comparison.metrics]
    known = {name for name in _OPTIONAL if any(row[name] is not None for row in comparison.rows)}
    return [*(column for column in COLUMNS if column.figure in known or column.figure not in _OPTIONAL), *own]


def speedup_cell(row: Row) -> str:
    """Return the speed-up if it may be claimed, its interval if not, and nothing if it was not measured."""
    if row.speedup is None:
        return ""
    if row.claimed_speedup is not None:
        return f"{row.claimed_speedup:.2f}"
    return f"{row.speedup.low:.2f}–{row.speedup.high:.2f}"


def print_comparison(console: Console, comparison: RunComparison, answer: Sequence[Sequence[Finding]]) -> None:
    """Print the table, the notes and the answer.

    Args:
        answer: findings of each task.
    """
    console.print(terminal_table(comparison, LISTED))
    further = len(comparison.rows) - LISTED
    lines = [f"{further} further runs are not in this table: --csv and the page have all."] if further > 0 else []
    shown = comparison.rows[:LISTED]
    lines += [f"{row.entry.label}: {row.entry.state}: {row.entry.detail}" for row in shown if row.entry.detail]
    for group in comparison.groups:
        if group.loss is not None:
            which = "given by --loss" if group.loss_given else "the lowest that every finished run reached"
            of = f" of {group.target}" if len(comparison.groups) > 1 else ""
            lines.append(f"Hours to a smoothed training loss{of} of {group.loss:.4g} ({which}).")
    for line in [*lines, *comparison.notes]:
        console.print(escape(line), soft_wrap=True, highlight=False)
    for group, findings in zip(comparison.groups, answer, strict=True):
        console.print(escape(f"\n{group.target}:") if len(comparison.groups) > 1 else "", highlight=False)
        for finding in findings:
            console.print(f"[bold]{finding.subject}:[/] {escape(finding.text)}", highlight=False)


def terminal_table(comparison: RunComparison, limit: int) -> Table:
    """Return a table with one line for each of the first ``limit`` runs; a value that was not measured is empty."""
    columns = [column for column in columns_of(comparison) if column.short]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in columns:
        table.add_column(column.short.format(hours=comparison.hours_unit), justify="right", overflow="fold")
    for row in comparison.rows[:limit]:
        state = f"[{COLOURS.get(row.entry.state, 'magenta')}]{row.entry.state}[/]"
        table.add_row(escape(row.entry.label), state, *(column.text(row) for column in columns))
    return table


def page_line(row: Row) -> dict[str, Any]:
    """Return a row of the page's table but for its figures: links to trackers, and remarks on the run."""
    entry = row.entry
    remarks = [
        entry.detail,
        f"in {entry.elsewhere}" if entry.elsewhere else "",
        row.data.problem,
        "the same run as an earlier row" if row.same_as else "",
        "" if row.ran_alone else "ran beside other cells: its times are not comparable",
    ]
    links = [] if entry.dir is None else [
        (name, where)
        for name, where, _ in tracker_lines(RunPaths(entry.dir), row.data.trackers)
        if where.startswith(("http://", "https://"))
    ]  # fmt: skip
    remark = "; ".join(filter(None, remarks))
    return {"label": entry.label, "state": entry.state, "links": links, "remarks": remark}


def _records(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return each row as a JSON object; None: unknown or not measured."""
    return [
        {
            "run": row.entry.label,
            "state": row.entry.state,
            "detail": row.entry.detail,
            "dir": str(row.entry.dir) if row.entry.dir else None,
            "elsewhere": row.entry.elsewhere or None,
            "same_as": row.same_as or None,
            "problem": row.data.problem or None,
            "sweep/at_once": row.data.cells_at_once,
            **row.figures,
        }
        for row in comparison.rows
    ]


def as_json(comparison: RunComparison) -> str:
    varying, settings = comparison.varying, [row.data.settings for row in comparison.rows]
    runs = [
        record | {"settings": {key: its.get(key) for key in varying} if its else {}}
        for record, its in zip(_records(comparison), settings, strict=True)
    ]
    content = {"title": comparison.title, "runs": runs, "notes": comparison.notes}
    return json.dumps(content, indent=2, allow_nan=False)


def as_csv(comparison: RunComparison) -> str:
    """Return CSV with a header and one line per run; an unknown value is an empty cell."""
    records = _records(comparison)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
