"""Commands on existing runs: `launch runs`, `status`, `logs`, `cancel`, `resume`, `retry`."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

from launcher.cli.names import Parser, resolve, resolve_any
from launcher.errors import EXIT_DONE, UserError
from launcher.plan.launch_plan import LaunchPlan
from launcher.report import live, run_list
from launcher.rundir import records
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_sweep
from launcher.runs import control
from launcher.runs.status import ACTIVE, Run, State, look
from launcher.sweeps.reuse import look_at_sweeps


def _parser(verb: str, does: str, *, run: bool = True) -> Parser:
    parser = Parser(prog=f"launch {verb}", description=does, allow_abbrev=False)
    if run:
        parser.add_argument("run", metavar="RUN", help="its name, its directory, or the beginning of its name")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    return parser


def runs(arguments: list[str]) -> int:
    parser = _parser("runs", "What runs exist, and how they stand; or the cells of a sweep.", run=False)
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help="a sweep's name, directory, or the beginning of one")
    parser.add_argument("--json", action="store_true", help="a list of objects, those of sweeps too")
    given = parser.parse_args(arguments)
    if given.sweep is not None:
        paths = resolve_any(given.sweep, given.dir)
        if not isinstance(paths, SweepPaths):
            raise UserError(f"{given.sweep}: is a run, and no sweep.\n  `launch status {given.sweep}` shows it.")
        return _show_cells(paths, as_json=given.json)
    found, sweeps = look(find(given.dir)), look_at_sweeps(find_sweeps(given.dir))
    if given.json:
        cells = [cell for several in sweeps.values() for cell in several]
        print(json.dumps([run.to_json() for run in [*found, *cells]], indent=2))
    elif not found and not sweeps:
        print(f"{given.dir} holds no run. Elsewhere: launch runs --dir DIR.")
    else:
        live.console().print(run_list.runs_table(found, {Path(sweep).name: its for sweep, its in sweeps.items()}))
    return EXIT_DONE


def _show_cells(paths: SweepPaths, *, as_json: bool) -> int:
    cells = look_at_sweeps([paths])[str(paths.root)]
    if as_json:
        print(json.dumps([cell.to_json() for cell in cells], indent=2))
    else:
        live.console().print(run_list.sweep_table(paths, cells))
    return EXIT_DONE


def status(arguments: list[str]) -> int:
    parser = _parser("status", "One run: where it is, what happened to it, and why it failed.")
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_args(arguments)
    paths = resolve_any(given.run, given.dir)
    if isinstance(paths, SweepPaths):
        return _show_cells(paths, as_json=given.json)
    run, happened = control.one(paths), records.read_events(paths)
    if given.json:
        known: dict[str, Any] = run.to_json() | {"events": happened}
        print(json.dumps(known, indent=2))
        return EXIT_DONE
    live.console().print(run_list.status_table(run, happened))
    if run.failure is not None:
        print(f"\n{run_list.failure_of(run)}")
    elif run.state.value in ("failed", "lost"):
        print("\n".join(live.end_of_log(paths, run)))
    return EXIT_DONE


def logs(arguments: list[str]) -> int:
    parser = _parser("logs", "What a rank printed, in all its attempts.")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument("--node", type=int, help="instead of a rank's, the log of a node's agent")
    parser.add_argument("--follow", action="store_true", help="until the run is over")
    given = parser.parse_args(arguments)
    paths = resolve(given.run, given.dir)
    source = live.rank_logs(paths, given.rank) if given.node is None else live.node_log(paths, given.node)
    if given.follow:
        control.follow(paths, live.LogFollower(source))
        return EXIT_DONE
    lines = source.lines(ended=True)
    if not lines and not source.exists():
        raise UserError(f"{given.run}: {source.missing()}")
    print("\n".join(lines))
    return EXIT_DONE


def cancel(arguments: list[str]) -> int:
    given = _parser("cancel", "End a run, or all of a sweep's; their workers save first.").parse_args(arguments)
    target = resolve_any(given.run, given.dir)
    runs = _chosen(target, ACTIVE, "there is nothing to cancel")
    ended = control.cancel(runs, partial(print, flush=True))
    for run in ended:
        print(f"{run.name}: {run.state.value}.")
    newest = f"the newest checkpoint{'' if len(ended) == 1 else 's'}"
    print(f"`launch resume {run_list.command_name(target.root)}` goes on from {newest}.")
    return EXIT_DONE


def _chosen(paths: RunPaths | SweepPaths, states: Container[State], otherwise: str) -> list[Run]:
    """Return the run with its state; for a sweep, the runs in one of ``states``.

    Raises:
        UserError: no cell of the sweep is in one of them.
    """
    if not isinstance(paths, SweepPaths):
        return [control.one(paths)]
    cells = look_at_sweeps([paths])[str(paths.root)]
    # cells with the same content share one run
    chosen = list({cell.dir: cell for cell in cells if cell.dir and cell.state in states}.values())
    if not chosen:
        raise UserError(f"{paths.root.name}: {run_list.states_text(cells)}: {otherwise}.")
    return chosen


def _again(
    verb: str, does: str, arguments: list[str], states: Container[State], again: Callable[[Run], LaunchPlan]
) -> int:
    """Restart a run, or runs of a sweep. ``verb``: resume also takes overrides."""
    parser = _parser(verb, does)
    parser.add_argument("--wait", action="store_true", help="of Slurm: follow it to its end")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    if verb == "resume":
        parser.add_argument("overrides", metavar="key=value", nargs="*", help="what is to change from here on")
        parser.add_argument("--force", action="store_true", help="even where it changes what is learned")
    given = parser.parse_intermixed_args(arguments)
    from launcher.cli import start, sweep

    target = resolve_any(given.run, given.dir)
    console = live.console(quiet=given.quiet)
    # also for a single run of a sweep: the sweep's manifest must record the cell's new run
    its_sweep = target if isinstance(target, SweepPaths) else SweepPaths(target.root.parent)
    if verb == "resume" and (given.overrides or given.force):
        from launcher.cli.change import resume_changed

        if isinstance(target, SweepPaths) or is_sweep(its_sweep.root):
            raise UserError(
                f"{given.run}: is {'a' if target is its_sweep else 'of a'} sweep, whose cells are what their overrides "
                "say: none of them can change.\n  Resume it as it is; or begin a run of its own: launch train."
            )
        return resume_changed(target, given.overrides, console, force=given.force, wait=given.wait)
    choose = partial(_chosen, target, states, f"there is nothing to {verb}")
    if is_sweep(its_sweep.root):
        return sweep.again(its_sweep, choose, again, console, wait=given.wait)
    return start.go_on(again(*choose()), console, wait=given.wait)


def resume(arguments: list[str]) -> int:
    over = frozenset(State) - ACTIVE - {State.done, State.unknown, State.impossible}
    does = (
        "Let a run go on from its newest checkpoint, in its own directory, with key=value for what is to change; or "
        "all of a sweep's that are not done."
    )
    return _again("resume", does, arguments, over, control.to_resume)


def retry(arguments: list[str]) -> int:
    does = "Begin a run anew, with the plan and the code that it had, under another name; of a sweep those that failed."
    return _again("retry", does, arguments, {State.failed, State.lost}, control.to_retry)
