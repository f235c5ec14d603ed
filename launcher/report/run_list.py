"""Existing runs and sweeps as tables and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from launcher.plan.launch_plan import LaunchPlan
from launcher.quantities import count, duration_text
from launcher.report.tables import best_text, failure_text, named_lines, near, resume_hint, tracker_lines
from launcher.rundir.files import last_lines, object_from_json
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs.status import ACTIVE, Run, RunState, metrics_text

COLOURS: dict[str, str] = {
    RunState.done: "green", RunState.running: "cyan", RunState.failed: "red", RunState.lost: "red",
    RunState.pending: "yellow", RunState.requeued: "yellow", RunState.stopped: "yellow",
    RunState.cancelled: "dim", RunState.unknown: "magenta", RunState.impossible: "magenta",
    RunState.unreadable: "red",
}  # fmt: skip


# rows of a table on the terminal, unless all are asked for: a thousand take a second
LISTED = 200


def runs_table(runs: Sequence[Run], sweeps: Mapping[str, Sequence[Run]]) -> Table:
    """Return one line per run, the newest last; then one per sweep, by name, with the number of cells in each state."""
    table = _table("run", "state", "step", "loss", "ranks", "job", "user", "created", "", wrapped=("",))
    for run in sorted(runs, key=lambda run: run.created):
        ranks, created = "" if run.ranks is None else str(run.ranks), _time(run.created)
        table.add_row(
            escape(run.name), *_progress(run), ranks, run.job or run.kind, escape(run.user), created, escape(run.detail)
        )
    for sweep, cells in sorted(sweeps.items()):
        users = ",".join(sorted({cell.user for cell in cells if cell.user}))
        created = _time(min((cell.created for cell in cells if cell.created), default=""))
        summary = states_text(cells, _colour)
        table.add_row(escape(sweep), "sweep", "", "", "", "", escape(users), created, summary)
    return table


def sweep_table(paths: SweepPaths, cells: Sequence[Run]) -> Table:
    """Return one line per cell, in the order in which the cells were requested."""
    table = _table("cell", "state", "step", "loss", "job", "run", "", wrapped=("cell", "run", ""))
    table.title = escape(f"Sweep {paths.root.name}: {states_text(cells)}")
    for cell in cells:
        elsewhere = cell.dir and Path(cell.dir).parent != paths.root  # the run belongs to another sweep
        run = f"{Path(cell.dir).parent.name}/{cell.name}" if elsewhere else cell.name
        label, job = escape(cell.cell or cell.name), cell.job or cell.kind
        table.add_row(label, *_progress(cell), job, escape(run), escape(cell.detail))
    return table


def _table(*columns: str, wrapped: tuple[str, ...]) -> Table:
    table = Table(title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column not in wrapped, overflow="fold")
    return table


def _progress(run: Run) -> tuple[str, str, str]:
    """Return the cells of a run for its state, step and loss."""
    return _colour(run.state, run.state.value), progress_text(run), "" if run.loss is None else f"{run.loss:.4f}"


def _colour(state: RunState, text: str) -> str:
    return f"[{COLOURS[state]}]{text}[/]"


def progress_text(run: Run) -> str:
    """Return ``120/1000``: the steps recorded and planned; empty before the first one."""
    if run.step is None:
        return ""
    return f"{run.step}/{run.steps}" if run.steps else str(run.step)


def _time(iso: str) -> str:
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M") if iso else ""


def states_text(
    runs: Sequence[Run], shown: Callable[[RunState, str], str] = lambda _, text: text, *, noun: str = "cell"
) -> str:
    """Return ``8 cells: 6 done, 1 failed, 1 impossible``; ``shown`` may colour the part of each state."""
    counted = Counter(run.state for run in runs)
    parts = [shown(state, f"{counted[state]} {state.value}") for state in RunState if counted[state]]
    return f"{count(len(runs), noun)}: {', '.join(parts)}"


def status_table(run: Run, events: Sequence[dict[str, Any]] = ()) -> Table:
    """Return a table on one run and its events."""
    table, add = named_lines(f"Run {run.name}: {run.state.value}")
    if run.detail and run.failure is None:  # a failure is shown as a whole, below
        add("why", run.detail)
    if run.job is not None:
        add("job", f"{run.job}, submitted {count(run.submissions, 'time')} by {run.user}")
    if run.nodes:
        ranks = "" if run.ranks is None else f": {count(run.ranks, 'rank')}"
        add("nodes", f"{run.nodes}{ranks}")
    if run.step is not None:
        left = "" if run.left_s is None else f", {duration_text(run.left_s)} left"
        add("step", progress_text(run) + ("" if run.loss is None else f", loss {run.loss:.4f}") + left)
    if run.held_out is not None:
        add("held-out", f"{run.held_out:.4f}")
    over = run.state is RunState.done or run.state in ACTIVE
    if run.resumes_from is not None or (run.step is not None and not over):
        hint = "" if over else resume_hint(run.failure, run.resumes_from or 0, command_name(Path(run.dir))).strip()
        step = "none" if run.resumes_from is None else f"of step {run.resumes_from}"
        add("checkpoint", step + (hint and f": {hint}"))
    if run.metrics:
        add("averages", metrics_text(run.metrics))
    if run.best is not None:
        where = "" if run.best["directory"] is None else f": {near(run.best['directory'])}"
        add("best", f"{best_text(run.best)}{where}")
    if run.precision is not None:
        add("precision", run.precision)
    add("files", near(run.dir))
    for title, where, problem in tracker_lines(RunPaths(Path(run.dir))):
        add(title, f"problem: {problem}" if problem else where)
        if problem and where:
            add("", where)
    for number, event in enumerate(events):
        add("" if number else "events", f"{_at(event):%Y-%m-%d %H:%M:%S}  {_event_text(event)}")
    return table


def _at(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["at"]).astimezone()


def _event_text(event: dict[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in ("at", "event") and value is not None}
    if isinstance(fields.get("nodes"), list):
        fields["nodes"] = " ".join(map(str, fields["nodes"]))
    keys = event["event"] == "changed"  # config keys, which are shown as they are written
    why = "" if keys else fields.pop("why", "")
    text = fields.get("what") or ", ".join(
        f"{name if keys else name.replace('_', ' ')} {value}" for name, value in fields.items()
    )
    return f"{event['event']}{f': {text}' if text else ''}{f' ({why})' if why else ''}"


def last_event(paths: RunPaths) -> str:
    """Return the newest event of a run with its time of day; empty without one."""
    for line in reversed(last_lines(paths.events, 2)):  # the last one may be incomplete
        if (event := object_from_json(line)) is not None:
            return f"{_at(event):%H:%M} {_event_text(event)}"
    return ""


def failure_of(run: Run) -> str:
    """Return the first failing rank's traceback, from any node: its log is in the run's directory."""
    assert run.failure is not None
    host = "" if "host" not in run.failure else f" (on {run.failure['host']})"
    return failure_text({"failure": run.failure}, run.failure.get("node", 0)) + host


def submitted_text(plan: LaunchPlan, job: str) -> str:
    """Return what was submitted, and the commands to use next."""
    assert plan.cluster.slurm is not None
    name, options = command_name(plan.paths.root), plan.cluster.slurm.options
    queue = f", partition {options['partition']}" if "partition" in options else ""
    nodes = f"{plan.cluster.range.text} node{'' if plan.cluster.nodes == 1 else 's'}"
    return (
        f"Submitted {plan.run.name} as Slurm job {job}: {nodes} × {plan.cluster.workers_per_node}{queue}.\n"
        f"  launch status {name}\n  launch logs {name} --follow\n  launch cancel {name}"
    )


def sweep_text(paths: SweepPaths, submitted: Sequence[str], reused: int) -> str:
    """Return what was started, and the commands to use next.

    Args:
        submitted: Slurm jobs of the cells.
        reused: number of cells that were not started, because equal ones are done or in progress.
    """
    name = command_name(paths.root)
    arrays = dict.fromkeys(job.partition("_")[0] for job in submitted)
    lines: list[str] = []
    if arrays:
        jobs = f"job{'' if len(arrays) == 1 else 's'} {', '.join(arrays)}"
        lines.append(f"Submitted {count(len(submitted), 'cell')} as Slurm {jobs}.")
    if reused:
        lines.append(f"{count(reused, 'cell')} not started: the same content is done or in progress.")
    lines += [f"  launch runs {name}", f"  launch report {name}"]
    return "\n".join([*lines, f"  launch cancel {name}"] if arrays else lines)


def impossible_lines(cells: Sequence[Run]) -> list[str]:
    return [f"launch: {cell.cell}: {cell.detail}" for cell in cells if cell.state is RunState.impossible]


def command_name(directory: Path) -> str:
    """Return the name by which commands accept a run's or sweep's directory from the working directory."""
    return directory.name if directory.parent == Path.cwd() / "runs" else near(directory)
