"""Reuse of a sweep's runs: the state of its cells, which need not start, and which are restarted."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.config.schema import ClusterKind
from launcher.errors import EXIT_USER, UserError
from launcher.launch.slurm import submit
from launcher.plan.launch_plan import LaunchPlan
from launcher.rundir.paths import RunPaths, SweepPaths, find_sweeps, is_run
from launcher.runs.status import ACTIVE, Run, RunState, statuses_of
from launcher.sweeps import manifest
from launcher.sweeps.local_cells import run_cells
from launcher.sweeps.manifest import Cell
from launcher.tracebacks import in_one_line


def look_at_sweeps(
    several: Sequence[SweepPaths], statuses: Callable[[Iterable[RunPaths]], list[Run]] = statuses_of
) -> dict[str, list[Run]]:
    """Return each sweep's cells in request order, by the sweep's directory; one row with the error if unreadable.

    Args:
        statuses: returns the status of each run.
    """
    cells_of: dict[str, list[tuple[Cell, RunPaths | None]] | Run] = {}
    for paths in several:
        try:
            cells_of[str(paths.root)] = _cells(paths)
        except UserError as error:
            sweep = str(paths.root)
            cells_of[sweep] = Run(state=RunState.unreadable, detail=str(error), sweep=sweep, cell=paths.root.name)
    runs = statuses(
        [run for cells in cells_of.values() if isinstance(cells, list) for _, run in cells if run is not None]
    )
    by_dir = {run.dir: run for run in runs}
    return {
        sweep: [_line(cell, run, by_dir, sweep) for cell, run in cells] if isinstance(cells, list) else [cells]
        for sweep, cells in cells_of.items()
    }


def _cells(paths: SweepPaths) -> list[tuple[Cell, RunPaths | None]]:
    sweep = manifest.load_sweep(paths)
    existing = {overrides: run for overrides, run in sweep.runs(paths).items() if is_run(run.root)}
    return [(cell, existing.get(cell.overrides)) for cell in sweep.cells]


def _line(cell: Cell, run: RunPaths | None, by_dir: dict[str, Run], sweep: str) -> Run:
    if run is not None:
        return dataclasses.replace(by_dir[str(run.root)], cell=cell.label, sweep=sweep)
    if cell.problem is not None:
        return Run(state=RunState.impossible, detail=in_one_line(cell.problem), sweep=sweep, cell=cell.label)
    detail = "not started: the same command continues with it"
    return Run(state=RunState.pending, detail=detail, sweep=sweep, cell=cell.label)


_LONGEST_LABEL = 80
_UNDER_WAY = ACTIVE | {RunState.unknown}
_SAVED = frozenset({RunState.stopped, RunState.cancelled})


@dataclass(frozen=True)
class ExistingRuns:
    """Existing runs by content.

    Attributes:
        reusable: finished in any sweep beside this one, or active in this one.
        resumable: stopped in this one, with a checkpoint.
    """

    reusable: dict[str, RunPaths]
    resumable: dict[str, RunPaths]


def run_name(cell: Cell) -> str:
    """Return a unique run name from overrides and content: ``accumulation=4+workers_per_node=2-3fa9c1d2``."""
    label = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", cell.label.replace(" ", "+"))[:_LONGEST_LABEL].strip("_+.-=")
    return f"{label or 'cell'}-{str(cell.content)[:8]}"


def recognise(wanted: Iterable[Cell], paths: SweepPaths) -> ExistingRuns:
    """Return the existing runs of the ``wanted`` cells; a run of this sweep takes precedence."""
    own = {str(cell.content): _of_name(paths.root / run_name(cell)) for cell in wanted}
    recorded = _recorded(paths, set(own))
    every = {str(run.root): run for several in (*own.values(), *recorded.values()) for run in several}
    state = {run.dir: run.state for run in statuses_of(every.values())}
    existing = ExistingRuns({}, {})
    for content, runs in own.items():
        newest_first = runs[::-1]
        done = [run for run in (*newest_first, *recorded.get(content, ())) if state[str(run.root)] is RunState.done]
        active = [run for run in newest_first if state[str(run.root)] in _UNDER_WAY]
        saved = [run for run in newest_first if state[str(run.root)] in _SAVED and run.newest_step()]
        if done or active:
            existing.reusable[content] = (done or active)[0]
        elif saved:
            existing.resumable[content] = saved[0]
    return existing


def _of_name(place: Path) -> list[RunPaths]:
    """Return the run of a cell, followed by its retries in order."""
    retries = [path for path in place.parent.glob(f"{place.name}.retry*") if path.suffix[6:].isdecimal()]
    places = [place, *sorted(retries, key=lambda path: int(path.suffix[6:]))]
    return [RunPaths(path) for path in places if is_run(path)]


def _recorded(paths: SweepPaths, contents: set[str]) -> dict[str, list[RunPaths]]:
    """Return the runs of ``contents`` in this sweep and all sweeps beside it."""
    recorded: dict[str, list[RunPaths]] = {}
    for sweep_paths in find_sweeps(paths.root.parent):
        try:
            sweep = manifest.load_sweep(sweep_paths)
        except UserError:  # written by another version, whose content differs, or not readable by this user
            continue
        runs = sweep.runs(sweep_paths)
        for cell in sweep.cells:
            if cell.content in contents and cell.overrides in runs and is_run(runs[cell.overrides].root):
                recorded.setdefault(str(cell.content), []).append(runs[cell.overrides])
    return recorded


@dataclass
class Restarted:
    """Restarted runs.

    Attributes:
        jobs: Slurm job ids.
        refused: Slurm's reasons for refusals.
        statuses: exit statuses of runs that have ended.
    """

    runs: list[RunPaths] = field(default_factory=list[RunPaths])
    jobs: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])
    statuses: list[int] = field(default_factory=list[int])


def restart_runs(
    paths: SweepPaths,
    choose: Callable[[], Sequence[Run]],
    planned: Callable[[Run], LaunchPlan],
    run_here: Callable[[LaunchPlan], int],
    watch: Callable[[Sequence[Run]], object],
    say: Callable[[str], object],
) -> Restarted:
    """Restart runs of a sweep; runs with equal Slurm requests become one array again.

    Args:
        choose: returns the runs to restart; called while the sweep is locked.
        planned: returns the plan of a run's next start, in its own directory or a new one.
        run_here: runs a plan on this machine and returns its exit status.
        watch: called periodically with the states of the cells, if they run side by side.
        say: shows a message to the user.
    """
    restarted = Restarted()

    def start(run: Run) -> LaunchPlan:
        plan = planned(run)
        _note(paths, run, plan)
        restarted.runs.append(plan.paths)
        return plan

    with manifest.alone(paths):
        runs = choose()
        # a run that was never submitted has no job
        of_slurm = [run for run in runs if run.kind == ClusterKind.slurm]
        if of_slurm:
            _submit(paths, of_slurm, planned, restarted)
        restarted.statuses += run_cells(
            [partial(start, run) for run in runs if run.kind != ClusterKind.slurm],
            manifest.load_sweep(paths).at_once or 1,
            run_here,
            lambda: watch(look_at_sweeps([paths])[str(paths.root)]),
            say,
        )
    return restarted


def _submit(paths: SweepPaths, runs: Sequence[Run], planned: Callable[[Run], LaunchPlan], restarted: Restarted) -> None:
    most, at_once = submit.max_array_size(), manifest.load_sweep(paths).at_once
    plans: list[LaunchPlan] = []
    sent: list[str | UserError] = []
    try:
        plans += map(planned, runs)
        sent += submit.submit_in_arrays(plans, paths.root.name, paths.slurm, most, at_once)
    finally:
        for number, (run, plan) in enumerate(zip(runs, plans, strict=False)):
            answer = sent[number] if sent else None
            if isinstance(answer, str):
                _note(paths, run, plan)
                restarted.runs.append(plan.paths)
                restarted.jobs.append(answer)
            elif str(plan.paths.root) != run.dir:  # created for this start, which failed
                shutil.rmtree(plan.paths.root, ignore_errors=True)
            if isinstance(answer, UserError):
                restarted.refused.append(f"{run.name}: {answer}")
                restarted.statuses.append(EXIT_USER)


def _note(paths: SweepPaths, run: Run, plan: LaunchPlan) -> None:
    """Record the plan's run as the run of the cell."""
    sweep = manifest.load_sweep(paths)
    runs = sweep.runs(paths)
    cells = [
        dataclasses.replace(cell, run=plan.run.name)
        for cell in sweep.cells
        if cell.overrides in runs and str(runs[cell.overrides].root) == run.dir and plan.paths.root.parent == paths.root
    ]
    sweep.with_cells(tuple(cells)).save(paths)
