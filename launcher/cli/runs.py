"""Commands on existing runs, such as `runs`, `top`, `status`, `logs`, `cancel`, `resume` and `report`."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.elsewhere import elsewhere
from launcher.cli.names import Parser, command_parser, resolve, resolve_any
from launcher.cli.overrides import flags_first
from launcher.errors import EXIT_DONE, EXIT_FAILED, UserError
from launcher.launch.agent import load_plan
from launcher.launch.outer_job import require_one_copy
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import no_collection
from launcher.quantities import printable
from launcher.report import live, run_list
from launcher.rundir import history
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_sweep
from launcher.runs import control
from launcher.runs.status import ACTIVE, Run, RunState, newest, statuses_of
from launcher.sweeps.reuse import look_at_sweeps
from launcher.trackers.installed import recorded_trackers

if TYPE_CHECKING:
    from rich.console import Console

_WATCH_S = 2.0


@no_collection()
def launch_runs(arguments: list[str]) -> int:
    parser = command_parser("runs", "List all runs with their states, or the cells of a sweep.", run=False)
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help="a sweep's name, directory, or a prefix of one")
    parser.add_argument("--json", action="store_true", help="a list of objects, the cells of sweeps included")
    parser.add_argument("--all", action="store_true", help=f"not only the newest {run_list.LISTED} runs")
    options = parser.parse_args(arguments)
    if options.sweep is not None:
        paths = resolve_any(options.sweep, options.dir)
        if not isinstance(paths, SweepPaths):
            raise UserError(f"{options.sweep}: is a run, not a sweep.\n  `launch status {options.sweep}` shows it.")
        return _show_cells(paths, as_json=options.json)
    there = elsewhere()
    found, several = find(options.dir), find_sweeps(options.dir)
    everything = options.all or options.json
    runs = statuses_of(found if everything else newest(found, run_list.LISTED))
    sweeps = look_at_sweeps(several, partial(statuses_of, brief=not options.json))
    if options.json:
        cells = [cell for several in sweeps.values() for cell in several]
        objects = [run.to_json() for run in [*runs, *cells]]
        print(json.dumps(objects + there.to_json(options.dir), indent=2))
        return EXIT_DONE
    if not runs and not sweeps and not there.has_runs(options.dir):
        print(f"There is no run in {options.dir}. For another directory: launch runs --dir DIR.")
    elif runs or sweeps:
        named = {Path(sweep).name: its for sweep, its in sweeps.items()}
        live.console().print(run_list.runs_table(runs, named))
        if len(runs) < len(found):
            print(f"{len(found) - len(runs)} older runs are not listed: launch runs --all, or --json.")
    return there.show(options.dir, ["--all"] if options.all else [])


def _show_cells(paths: SweepPaths, *, as_json: bool) -> int:
    cells = look_at_sweeps([paths])[str(paths.root)]
    if as_json:
        print(json.dumps([cell.to_json() for cell in cells], indent=2))
    else:
        live.console().print(run_list.sweep_table(paths, cells))
    return EXIT_DONE


def launch_status(arguments: list[str]) -> int:
    parser = command_parser("status", "Show one run: its state, its place, its events, and why it failed.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object")
    form.add_argument("--watch", action="store_true", help="show it until it is over; exit status: that of the run")
    options = parser.parse_args(arguments)
    paths = resolve_any(options.run, options.dir)
    if options.watch:
        return _watch(paths)
    if isinstance(paths, SweepPaths):
        return _show_cells(paths, as_json=options.json)
    run, events = control.status_of(paths), history.read_events(paths)
    if options.json:
        trackers = {
            name: status for name in recorded_trackers(paths) if (status := read_json(paths.tracker_status(name)))
        }
        print(json.dumps(run.to_json() | {"trackers": trackers, "events": events}, indent=2))
        return EXIT_DONE
    live.console().print(run_list.status_table(run, events))
    _print_failure(paths, run)
    return EXIT_DONE


def _print_failure(paths: RunPaths, run: Run) -> None:
    if run.failure is not None:
        print(f"\n{run_list.failure_of(run)}")
    elif run.state.value in ("failed", "lost"):
        print(printable("\n".join(live.end_of_log(paths, run))))


def _watch(paths: RunPaths | SweepPaths) -> int:
    """Show a run, or a sweep's cells, until they are over. Return the exit status of the first one that is not done."""
    from rich.live import Live

    # without a terminal only the last state is printed
    with Live(console=live.console(), auto_refresh=False) as display:
        while True:
            if isinstance(paths, SweepPaths):
                runs = look_at_sweeps([paths])[str(paths.root)]
                display.update(run_list.sweep_table(paths, runs), refresh=True)
            else:
                runs = [control.status_of(paths)]
                display.update(run_list.status_table(runs[0], history.read_events(paths)), refresh=True)
            if not any(run.state in control.MAY_CONTINUE for run in runs):
                break
            time.sleep(_WATCH_S)
    if isinstance(paths, RunPaths):
        _print_failure(paths, runs[0])
    return next((status for run in runs if (status := control.run_exit_status(run))), EXIT_DONE)


def launch_logs(arguments: list[str]) -> int:
    parser = command_parser("logs", "Print the output of a rank, of all its attempts.")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument("--node", type=int, help="print the log of this node's agent instead")
    parser.add_argument("--follow", action="store_true", help="print new lines until the run ends")
    options = parser.parse_args(arguments)
    paths = resolve(options.run, options.dir)
    source = live.rank_logs(paths, options.rank) if options.node is None else live.node_log(paths, options.node)
    if options.follow:
        if options.node is None and options.rank == 0:
            console = live.console()
            control.follow(paths, live.LiveDisplay(load_plan(paths.plan), console, whole=True))
            live.finish_output(console, patient=True)
        else:
            control.follow(paths, live.LogFollower(source))
        return EXIT_DONE
    lines = source.lines(ended=True)
    if not lines and not source.exists():
        raise UserError(f"{options.run}: {source.missing()}")
    print("\n".join(lines))
    return EXIT_DONE


def launch_cancel(arguments: list[str]) -> int:
    options = command_parser(
        "cancel", "Stop a run, or all runs of a sweep; their workers save a checkpoint first."
    ).parse_args(arguments)
    target = resolve_any(options.run, options.dir)
    runs = _chosen(target, ACTIVE, "there is nothing to cancel")
    ended = control.cancel_runs(runs, partial(print, flush=True))
    for run in ended:
        print(f"{printable(run.name)}: {run.state.value}.")
    newest = f"the newest checkpoint{'' if len(ended) == 1 else 's'}"
    print(f"`launch resume {run_list.command_name(target.root)}` continues from {newest}.")
    return EXIT_DONE


def _chosen(paths: RunPaths | SweepPaths, states: Container[RunState], otherwise: str) -> list[Run]:
    """Return the run with its state; for a sweep, the runs in one of ``states``.

    Raises:
        UserError: no cell of the sweep is in one of them.
    """
    if not isinstance(paths, SweepPaths):
        return [control.status_of(paths)]
    cells = look_at_sweeps([paths])[str(paths.root)]
    # cells with the same content share one run
    chosen = list({cell.dir: cell for cell in cells if cell.dir and cell.state in states}.values())
    if not chosen:
        raise UserError(f"{paths.root.name}: {run_list.states_text(cells)}: {otherwise}.")
    return chosen


def launch_resume(arguments: list[str]) -> int:
    parser = _restart_parser("resume", "Resume a run from its newest checkpoint, or all unfinished runs of a sweep.")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change; not for runs of a sweep")
    parser.add_argument("--force", action="store_true", help="allow changes of keys that affect what is learned")
    options = parser.parse_intermixed_args(arguments)
    require_one_copy(None, ["resume", *arguments])
    if not options.overrides and not options.force:
        states = frozenset(RunState) - ACTIVE - {
            RunState.done, RunState.unknown, RunState.unreadable, RunState.impossible,
        }  # fmt: skip
        return _restart("resume", options, states, control.to_resume)
    target = resolve_any(options.run, options.dir)
    if isinstance(target, SweepPaths) or is_sweep(target.root.parent):
        raise UserError(
            f"{options.run}: is {'a' if isinstance(target, SweepPaths) else 'a run of a'} sweep, whose runs cannot "
            "change: their overrides identify them.\n  Resume it without key=value, or start a run of its own: "
            "launch train."
        )
    return _resume_changed(target, options.overrides, live.console(quiet=options.quiet), options.force, options.wait)


def launch_retry(arguments: list[str]) -> int:
    does = "Start a run again from step 0 under another name, with its plan and code; of a sweep, the failed runs."
    parser = _restart_parser("retry", does)
    parser.add_argument("--failed", action="store_true", help="of a sweep, the failed runs, which is the default")
    options = parser.parse_args(arguments)
    require_one_copy(None, ["retry", *arguments])
    return _restart("retry", options, {RunState.failed, RunState.lost}, control.to_retry)


def launch_mirror(arguments: list[str]) -> int:
    options = command_parser(
        "mirror", "Send the trackers of a run that has ended what they lack of its record."
    ).parse_args(arguments)
    paths = resolve(options.run, options.dir)
    outcome = control.mirror_again(control.status_of(paths))
    for title, problem in outcome:
        print(f"{title}: {problem or 'has the whole record.'}")
    return EXIT_FAILED if any(problem for _, problem in outcome) else EXIT_DONE


def _restart_parser(verb: str, does: str) -> Parser:
    parser = command_parser(verb, does)
    parser.add_argument("--wait", action="store_true", help="cluster=slurm: wait for the end")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def _restart(verb: str, options: Namespace, states: Container[RunState], planned: Callable[[Run], LaunchPlan]) -> int:
    """Restart a run, or runs of a sweep.

    Args:
        planned: returns the plan of a run's next start.
    """
    from launcher.cli.train import restart, restart_cells

    target, console = resolve_any(options.run, options.dir), live.console(quiet=options.quiet)
    choose = partial(_chosen, target, states, f"there is nothing to {verb}")
    # also for a single run of a sweep: the sweep's manifest must record the cell's new run
    sweep = target if isinstance(target, SweepPaths) else SweepPaths(target.root.parent)
    if is_sweep(sweep.root):
        return restart_cells(sweep, choose, planned, console, wait=options.wait)
    return restart(planned(*choose()), console, wait=options.wait)


def _resume_changed(paths: RunPaths, overrides: list[str], console: Console, force: bool, wait: bool) -> int:
    """Resume a run with changes. All checks precede the first write; a plan that cannot be submitted is withdrawn."""
    from launcher.cli.train import restart
    from launcher.runs.amendment import changed, replan

    flags_first(overrides)  # checks them
    if odd := [word for word in overrides if word[0] in "+~"]:
        raise UserError(f"{odd[0]}: launch resume only changes existing keys: key=value.\n  Leave the {odd[0][0]} out.")
    run = control.status_of(paths)
    old = control.to_change(run)
    if not isinstance(old, RunPlan):
        raise UserError(f"{run.name}: is a script of `launch run`, which takes no overrides.\n  Resume it without.")
    new = replan(paths, old, overrides, force=force, done=run.state is RunState.done)
    with changed(new.plan, new.yaml):
        if new.changed:
            console.print(f"{run.name} continues with {new.text}.", markup=False, highlight=False)
            history.note_event(paths, "changed", **{each.key: each.text for each in new.changed})
        return restart(new.plan, console, wait=wait)
