"""Cells of a sweep that are begun again: resumed in their directories, or anew under other names."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.cluster.slurm import submit
from launcher.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USER, UserError
from launcher.paths import RunPaths, SweepPaths
from launcher.plan import LaunchPlan
from launcher.runstate import Run
from launcher.sweeps import book


@dataclass
class Again:
    """What was begun: the runs, Slurm's job ids, why it refused some, and exit statuses of what is over."""

    runs: list[RunPaths] = field(default_factory=list[RunPaths])
    jobs: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])
    statuses: list[int] = field(default_factory=list[int])


def begin_again(
    paths: SweepPaths,
    choose: Callable[[], Sequence[Run]],
    planned: Callable[[Run], LaunchPlan],
    run_here: Callable[[LaunchPlan], int],
) -> Again:
    """Begin runs of a sweep's once more, those that ask Slurm for the same as one array again.

    Args:
        choose: the runs, as they stand when nobody else begins any.
        planned: the plan of a run's next start, in its own directory or in a new one.
        run_here: runs a plan on this machine, and returns its exit status.
    """
    begun = Again()
    with book.alone(paths):
        runs = choose()
        of_slurm = [run for run in runs if run.job is not None]
        if of_slurm:
            _submit(paths, of_slurm, planned, begun)
        for run in runs:
            if run.job is not None:
                continue
            plan = planned(run)
            _note(paths, run, plan)
            begun.runs.append(plan.paths)
            begun.statuses.append(run_here(plan))
            if begun.statuses[-1] in (EXIT_INTERRUPTED, EXIT_RESUMABLE):  # no more of it is wanted
                break
    return begun


def _submit(paths: SweepPaths, runs: Sequence[Run], planned: Callable[[Run], LaunchPlan], begun: Again) -> None:
    most, at_once = submit.most_in_array(), book.load(paths).at_once
    plans: list[LaunchPlan] = []
    sent: list[str | UserError] = []
    try:
        plans += map(planned, runs)
        sent += submit.send_all(plans, paths.root.name, paths.slurm, most, at_once)
    finally:
        for number, (run, plan) in enumerate(zip(runs, plans, strict=False)):
            answer = sent[number] if sent else None
            if isinstance(answer, str):
                _note(paths, run, plan)
                begun.runs.append(plan.paths)
                begun.jobs.append(answer)
            elif str(plan.paths.root) != run.dir:  # made for this start, which did not come about
                shutil.rmtree(plan.paths.root, ignore_errors=True)
            if isinstance(answer, UserError):
                begun.refused.append(f"{run.name}: {answer}")
                begun.statuses.append(EXIT_USER)


def _note(paths: SweepPaths, run: Run, plan: LaunchPlan) -> None:
    """The cell's run is this one now."""
    sweep = book.load(paths)
    runs = sweep.runs(paths)
    cells = [
        dataclasses.replace(cell, run=plan.run.name)
        for cell in sweep.cells
        if cell.overrides in runs and str(runs[cell.overrides].root) == run.dir and plan.paths.root.parent == paths.root
    ]
    sweep.with_cells(tuple(cells)).save(paths)
