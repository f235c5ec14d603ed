"""How the cells of a sweep stand: each by the run that it has, asking Slurm once for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from launcher.cluster.ledger import look
from launcher.cluster.naming import is_run
from launcher.errors import UserError
from launcher.paths import RunPaths, SweepPaths
from launcher.runstate import Run, State
from launcher.sweeps import book
from launcher.sweeps.book import Cell


def look_at_sweeps(several: Sequence[SweepPaths]) -> dict[str, list[Run]]:
    """The cells of each, by the sweep's directory, in the order in which they were asked for; one line that says why
    where a sweep cannot be read."""
    found: dict[str, list[tuple[Cell, RunPaths | None]] | Run] = {}
    for paths in several:
        try:
            found[str(paths.root)] = _cells(paths)
        except UserError as error:
            found[str(paths.root)] = _without_run(State.unknown, str(error), paths, paths.root.name)
    runs = look([run for cells in found.values() if isinstance(cells, list) for _, run in cells if run is not None])
    by_dir = {run.dir: run for run in runs}
    return {
        sweep: [_line(cell, run, by_dir, SweepPaths(Path(sweep))) for cell, run in cells]
        if isinstance(cells, list)
        else [cells]
        for sweep, cells in found.items()
    }


def _cells(paths: SweepPaths) -> list[tuple[Cell, RunPaths | None]]:
    sweep = book.load(paths)
    there = {overrides: run for overrides, run in sweep.runs(paths).items() if is_run(run.root)}
    return [(cell, there.get(cell.overrides)) for cell in sweep.cells]


def _line(cell: Cell, run: RunPaths | None, by_dir: dict[str, Run], paths: SweepPaths) -> Run:
    if run is not None:
        return dataclasses.replace(by_dir[str(run.root)], cell=cell.label, sweep=str(paths.root))
    if cell.problem is not None:
        return _without_run(State.impossible, " ".join(cell.problem.split()), paths, cell.label)
    return _without_run(State.pending, "not begun: the same command goes on with it", paths, cell.label)


def _without_run(state: State, detail: str, paths: SweepPaths, cell: str) -> Run:
    return Run(
        name="",
        dir="",
        kind="",
        state=state,
        detail=detail,
        user="",
        created="",
        job=None,
        nodes="",
        ranks=None,
        submissions=0,
        step=None,
        steps=None,
        loss=None,
        failure=None,
        sweep=str(paths.root),
        cell=cell,
    )
