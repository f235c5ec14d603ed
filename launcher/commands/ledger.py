"""`launch runs`, `status`, `logs`, `cancel`, `resume`, `retry`: what is done with runs that exist."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from launcher.cluster import control, events
from launcher.cluster.ledger import find, look, resolve
from launcher.commands.parser import Parser
from launcher.errors import EXIT_DONE, UserError
from launcher.plan import RunPlan
from launcher.report import logs as shown_logs
from launcher.report import runs as shown
from launcher.report import terminal


def _parser(verb: str, does: str, *, run: bool = True) -> Parser:
    parser = Parser(prog=f"launch {verb}", description=does, allow_abbrev=False)
    if run:
        parser.add_argument("run", metavar="RUN", help="its name, its directory, or the beginning of its name")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    return parser


def runs(arguments: list[str]) -> int:
    parser = _parser("runs", "What runs exist, and how they stand.", run=False)
    parser.add_argument("--json", action="store_true", help="a list of objects")
    given = parser.parse_args(arguments)
    found = look(find(given.dir))
    if given.json:
        print(json.dumps([run.to_json() for run in found], indent=2))
    elif not found:
        print(f"{given.dir} holds no run. Elsewhere: launch runs --dir DIR.")
    else:
        terminal.console().print(shown.runs_table(found))
    return EXIT_DONE


def status(arguments: list[str]) -> int:
    parser = _parser("status", "One run: where it is, what happened to it, and why it failed.")
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_args(arguments)
    paths = resolve(given.run, given.dir)
    run, happened = control.one(paths), events.read(paths)
    if given.json:
        known: dict[str, Any] = run.to_json() | {"events": happened}
        print(json.dumps(known, indent=2))
        return EXIT_DONE
    terminal.console().print(shown.status_table(run, happened))
    if run.failure is not None:
        print(f"\n{shown.failure_of(run)}")
    elif run.state.value in ("failed", "lost"):
        print("\n".join(shown_logs.last_words(paths, run)))
    return EXIT_DONE


def logs(arguments: list[str]) -> int:
    parser = _parser("logs", "What a rank printed, in all its attempts.")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument("--node", type=int, help="instead of a rank's, the log of a node's agent")
    parser.add_argument("--follow", action="store_true", help="until the run is over")
    given = parser.parse_args(arguments)
    paths = resolve(given.run, given.dir)
    source = shown_logs.of_rank(paths, given.rank) if given.node is None else shown_logs.of_node(paths, given.node)
    if given.follow:
        control.follow(paths, shown_logs.Following(source))
        return EXIT_DONE
    lines = source.lines(over=True)
    if not lines and not source.exists():
        raise UserError(f"{given.run}: {source.missing()}")
    print("\n".join(lines))
    return EXIT_DONE


def cancel(arguments: list[str]) -> int:
    given = _parser("cancel", "End a run; its workers save first.").parse_args(arguments)
    paths = resolve(given.run, given.dir)
    run = control.cancel(paths, partial(print, flush=True))
    print(f"{run.name}: {run.state.value}. `launch resume {given.run}` goes on from its newest checkpoint.")
    return EXIT_DONE


def _again(verb: str, does: str, arguments: list[str]) -> int:
    parser = _parser(verb, does)
    parser.add_argument("--wait", action="store_true", help="of Slurm: follow it to its end")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    given = parser.parse_args(arguments)
    from launcher.commands import jobs

    plan, job = (control.resume if verb == "resume" else control.retry)(resolve(given.run, given.dir))
    console = terminal.console(quiet=given.quiet)
    if job is not None:
        return jobs.submitted(plan, job, console, wait=given.wait)
    from launcher.cluster.peers import Alone

    if isinstance(plan, RunPlan):
        return jobs.run_here(plan, Alone(), console)
    return jobs.run_script_here(plan, Alone(), console)


def resume(arguments: list[str]) -> int:
    return _again("resume", "Let a run go on from its newest checkpoint, in its own directory.", arguments)


def retry(arguments: list[str]) -> int:
    return _again("retry", "Begin a run anew, with the plan and the code that it had, under another name.", arguments)
