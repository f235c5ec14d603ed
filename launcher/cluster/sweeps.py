"""How the cells of a sweep stand: each by the run that it has, asking Slurm once for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.cluster.ledger import look
from launcher.cluster.naming import is_run
from launcher.paths import RunPaths, SweepPaths
from launcher.runstate import Run, State
from launcher.sweeps import book
from launcher.sweeps.book import Cell


def look_at_sweeps(several: Sequence[SweepPaths]) -> dict[str, list[Run]]:
    """The cells of each, by the sweep's directory, in the order in which they were asked for.

    Raises:
        UserError: a sweep.json of another version.
    """
    found = {str(paths.root): _cells(paths) for paths in several}
    runs = look([run for cells in found.values() for _, run in cells if run is not None])
    by_dir = {run.dir: run for run in runs}
    return {
        sweep: [_not_begun(cell) if run is None else _named(by_dir[str(run.root)], cell, sweep) for cell, run in cells]
        for sweep, cells in found.items()
    }


def _cells(paths: SweepPaths) -> list[tuple[Cell, RunPaths | None]]:
    sweep = book.load(paths)
    runs = sweep.runs(paths)
    there = {overrides: run for overrides, run in runs.items() if is_run(run.root)}
    return [(cell, there.get(cell.overrides)) for cell in sweep.cells]


def _named(run: Run, cell: Cell, sweep: str) -> Run:
    return dataclasses.replace(run, cell=cell.label, sweep=sweep)


def _not_begun(cell: Cell) -> Run:
    impossible = cell.problem is not None
    return Run(
        name="",
        dir="",
        kind="",
        state=State.impossible if impossible else State.pending,
        detail=cell.problem.splitlines()[0] if cell.problem else "not begun: the same command goes on with it",
        user="",
        created="",
        job=None,
        nodes="",
        submissions=0,
        step=None,
        steps=None,
        loss=None,
        failure=None,
        cell=cell.label,
    )
