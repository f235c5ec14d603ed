"""Sweeps on the command line: `launch train -m`, and `launch resume` and `retry` of a sweep."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import with_config
from launcher.cli.start import require_no_wait, run_here
from launcher.config.multirun import AskedCell, Result
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUMABLE, RunError
from launcher.launch.peers import Peers
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.report import live
from launcher.report import run_list as shown
from launcher.rundir.paths import SweepPaths
from launcher.runs import control
from launcher.runs.status import Run
from launcher.sweeps.conductor import Conductor
from launcher.sweeps.reuse import begin_again, look_at_sweeps

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.schema import Config


def train_sweep(arguments: list[str], *, quiet: bool, wait: bool, confirmed: bool) -> int:
    """Run a sweep and return the highest exit status of its cells; 2 if a cell is impossible, the others run anyway."""
    console = live.console(quiet=quiet)
    say = partial(console.print, markup=False, highlight=False)
    conductor = Conductor(arguments, _here(console), _watching(console), say, wait=wait)

    def begin(asked: Sequence[AskedCell], with_results: bool) -> Sequence[Result]:
        require_no_wait(asked[0].config, wait=wait)
        return conductor.begin(asked, with_results)

    def keep(files: Path) -> None:
        """Copy a sweeper's own results, such as Optuna's optimization_results.yaml."""
        for file in files.glob("*_results.yaml"):
            if conductor.paths is not None and conductor.paths.root.is_dir():
                shutil.copy2(file, conductor.paths.root)

    try:
        status = with_config("train", arguments, _never, cells=begin, confirmed=confirmed, keep=keep)
    except KeyboardInterrupt:
        status = EXIT_RESUMABLE if conductor.status == EXIT_RESUMABLE else EXIT_INTERRUPTED
        if conductor.submitted:
            console.print("No longer watching; the jobs go on.", markup=False)
    except RunError as error:  # raised by a sweeper that needs the cell's result
        print(f"launch: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if conductor.paths is not None and conductor.paths.book.exists():
        _show(conductor.paths, conductor.submitted, len(conductor.known), console)
    return max(status, conductor.status)


def again(
    paths: SweepPaths,
    choose: Callable[[], Sequence[Run]],
    planned: Callable[[Run], LaunchPlan],
    console: Console,
    *,
    wait: bool,
) -> int:
    """Restart runs of a sweep and show the result; see ``launcher.sweeps.reuse.begin_again``."""
    begun = begin_again(paths, choose, planned, _here(console))
    for problem in begun.refused:
        print(f"launch: {problem}", file=sys.stderr)
    statuses = begun.statuses
    if begun.jobs and wait:
        statuses += [control.exit_status(run) for run in control.wait_for(begun.runs, _watching(console))]
    _show(paths, begun.jobs, 0, console)
    return max(statuses, default=EXIT_DONE)


def _here(console: Console) -> Callable[[LaunchPlan], int]:
    def run(plan: LaunchPlan) -> int:
        assert isinstance(plan, RunPlan)
        return run_here(plan, Peers(), console)

    return run


def _watching(console: Console) -> Callable[[Sequence[Run]], None]:
    last = ""

    def watch(runs: Sequence[Run]) -> None:
        """Print a line whenever a state has changed."""
        nonlocal last
        if (line := shown.states_text(runs)) != last:
            last = line
            console.print(line, markup=False, highlight=False)

    return watch


def _show(paths: SweepPaths, jobs: Sequence[str], known: int, console: Console) -> None:
    cells = look_at_sweeps([paths])[str(paths.root)]
    console.print(shown.sweep_table(paths, cells))
    console.print(shown.sweep_text(paths, jobs, known), markup=False, highlight=False)
    if console.quiet:
        for line in shown.impossible_lines(cells):
            print(line, file=sys.stderr)


def _never(config: Config, yaml: str) -> int:  # noqa: ARG001
    raise AssertionError("a sweep's cells come by way of the conductor")
