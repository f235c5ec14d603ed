"""Sweeps as tables and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from launcher.paths import SweepPaths
from launcher.report.runs import COLOURS, called, step_text
from launcher.runstate import Run, State


def sweep_table(paths: SweepPaths, cells: Sequence[Run]) -> Table:
    """A line a cell, in the order in which they were asked for."""
    table = Table(
        title=escape(f"Sweep {paths.root.name}: {states_text(cells)}"),
        title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold",
    )  # fmt: skip
    for column in ("cell", "state", "step", "loss", "job", "run", ""):
        table.add_column(column, no_wrap=column not in ("cell", "run", ""), overflow="fold")
    for cell in cells:
        table.add_row(
            escape(cell.cell or cell.name),
            f"[{COLOURS[cell.state]}]{cell.state.value}[/]",
            step_text(cell),
            "" if cell.loss is None else f"{cell.loss:.4f}",
            cell.job or cell.kind,
            escape(_named_from(paths, cell)),
            escape(cell.detail),
        )
    return table


def states_text(runs: Sequence[Run]) -> str:
    """``8 cells: 6 done, 1 failed, 1 impossible``"""
    counted = Counter(run.state for run in runs)
    parts = [f"{counted[state]} {state.value}" for state in State if counted[state]]
    return f"{len(runs)} cell{'' if len(runs) == 1 else 's'}: {', '.join(parts)}"


def what_next(paths: SweepPaths, submitted: Sequence[str], known: int) -> str:
    """What was begun, and the commands that follow."""
    name = called(paths.root)
    arrays = dict.fromkeys(job.partition("_")[0] for job in submitted)
    lines: list[str] = []
    if arrays:
        jobs = f"job{'' if len(arrays) == 1 else 's'} {', '.join(arrays)}"
        lines.append(f"Submitted {len(submitted)} cell{'' if len(submitted) == 1 else 's'} as Slurm {jobs}.")
    if known:
        lines.append(f"{known} of this content had been done, or are under way, and did not begin again.")
    lines += [f"  launch runs {name}", f"  launch report {name}"]
    if arrays:
        lines.append(f"  launch cancel {name}")
    return "\n".join(lines)


def impossible_lines(cells: Sequence[Run]) -> list[str]:
    return [f"launch: {cell.cell}: {cell.detail}" for cell in cells if cell.state is State.impossible]


def _named_from(paths: SweepPaths, cell: Run) -> str:
    """A run's name, with its sweep's where that is another one."""
    if not cell.dir or Path(cell.dir).parent == paths.root:
        return cell.name
    return f"{Path(cell.dir).parent.name}/{cell.name}"
