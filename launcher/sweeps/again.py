"""Cells of a sweep that are begun again: resumed in their directories, or anew under other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from launcher.cluster.slurm import submit
from launcher.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USER, UserError
from launcher.paths import RunPaths, SweepPaths
from launcher.plan import LaunchPlan
from launcher.runstate import Run
from launcher.sweeps import book


def begin_again(
    paths: SweepPaths,
    runs: Sequence[Run],
    planned: Callable[[Run], LaunchPlan],
    run_here: Callable[[LaunchPlan], int],
) -> tuple[list[RunPaths], list[str], list[int]]:
    """Begin these runs of a sweep's once more, those that ask Slurm for the same as one array again.

    Args:
        planned: the plan of a run's next start, in its own directory or in a new one.
        run_here: runs a plan on this machine, and returns its exit status.

    Returns:
        The runs that were begun, Slurm's job ids, and exit statuses of what is over.
    """
    with book.alone(paths):
        plans = {run.dir: planned(run) for run in runs}
        sweep = book.load(paths)
        cells = [
            dataclasses.replace(cell, run=plan.run.name)
            for cell in sweep.cells
            if (its := sweep.runs(paths).get(cell.overrides)) and (plan := plans.get(str(its.root)))
            and plan.paths.root.parent == paths.root
        ]  # fmt: skip
        sweep = sweep.with_cells(tuple(cells))
        sweep.save(paths)
        of_slurm = [plan for plan in plans.values() if plan.cluster.slurm is not None]
        answers = submit.send_all(of_slurm, paths.root.name, paths.slurm, sweep.at_once) if of_slurm else []
        statuses: list[int] = []
        jobs: list[str] = []
        for plan, answer in zip(of_slurm, answers, strict=True):
            if isinstance(answer, UserError):
                print(f"{plan.run.name}: {answer}")
                statuses.append(EXIT_USER)
            else:
                jobs.append(answer)
        for plan in plans.values():
            if plan.cluster.slurm is None:
                statuses.append(run_here(plan))
                if statuses[-1] in (EXIT_INTERRUPTED, EXIT_RESUMABLE):  # no more of it is wanted
                    break
    return [plan.paths for plan in plans.values()], jobs, statuses
