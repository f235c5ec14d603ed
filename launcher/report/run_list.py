"""Existing runs and sweeps as tables and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from launcher.plan.launch_plan import LaunchPlan
from launcher.quantities import count
from launcher.report.tables import failure_text, named_lines, near
from launcher.rundir.paths import SweepPaths
from launcher.runs.status import Run, State

COLOURS: dict[str, str] = {
    State.done: "green", State.running: "cyan", State.failed: "red", State.lost: "red", State.pending: "yellow",
    State.requeued: "yellow", State.stopped: "yellow", State.cancelled: "dim", State.unknown: "magenta",
    State.impossible: "magenta",
}  # fmt: skip


def runs_table(runs: Sequence[Run], sweeps: Mapping[str, Sequence[Run]]) -> Table:
    """Return one line per run, the newest last; then one per sweep, by name, with the number of cells in each state."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("run", "state", "step", "loss", "ranks", "job", "user", "begun", ""):
        table.add_column(column, no_wrap=column != "", overflow="fold")
    for run in sorted(runs, key=lambda run: run.created):
        table.add_row(
            escape(run.name),
            f"[{COLOURS[run.state]}]{run.state.value}[/]",
            step_text(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.ranks is None else str(run.ranks),
            run.job or run.kind,
            escape(run.user),
            _when(run.created),
            escape(run.detail),
        )
    for sweep, cells in sorted(sweeps.items()):
        counted = Counter(cell.state for cell in cells)
        states = ", ".join(f"[{COLOURS[state]}]{counted[state]} {state.value}[/]" for state in State if counted[state])
        begun = min((cell.created for cell in cells if cell.created), default="")
        users = ",".join(sorted({cell.user for cell in cells if cell.user}))
        table.add_row(
            escape(sweep),
            "sweep",
            "",
            "",
            "",
            "",
            escape(users),
            _when(begun),
            f"{count(len(cells), 'cell')}: {states}",
        )
    return table


def status_table(run: Run, happened: Sequence[dict[str, Any]] = ()) -> Table:
    """Return a table on one run and its events."""
    table, add = named_lines(f"Run {run.name}: {run.state.value}")
    if run.detail:
        add("why", run.detail)
    if run.job is not None:
        add("job", f"{run.job}, submitted {run.submissions} time{'' if run.submissions == 1 else 's'} by {run.user}")
    if run.nodes:
        ranks = "" if run.ranks is None else f": {run.ranks} rank{'' if run.ranks == 1 else 's'}"
        add("nodes", f"{run.nodes}{ranks}")
    if run.step is not None:
        add("step", step_text(run) + ("" if run.loss is None else f", loss {run.loss:.4f}"))
    if run.precision is not None:
        add("precision", run.precision)
    add("files", near(run.dir))
    for number, event in enumerate(happened):
        add("" if number else "events", _event(event))
    return table


def failure_of(run: Run) -> str:
    """Return the first failing rank's traceback, from any node: its log is in the run's directory."""
    assert run.failure is not None
    where = "" if "host" not in run.failure else f" (on {run.failure['host']})"
    return failure_text({"failure": run.failure}, run.failure.get("node", 0)) + where


def submitted_text(plan: LaunchPlan, job: str) -> str:
    assert plan.cluster.slurm is not None
    name, options = called(plan.paths.root), plan.cluster.slurm.options
    queue = f", partition {options['partition']}" if "partition" in options else ""
    nodes = f"{plan.cluster.range.words} node{'' if plan.cluster.nodes == 1 else 's'}"
    return (
        f"Submitted {plan.run.name} as Slurm job {job}: {nodes} × {plan.cluster.workers_per_node}{queue}.\n"
        f"  launch status {name}\n  launch logs {name} --follow\n  launch cancel {name}"
    )


def called(place: Path) -> str:
    """Return the name of a run's or sweep's directory ``place`` as commands accept it from here."""
    return place.name if place.parent == Path.cwd() / "runs" else near(place)


def step_text(run: Run) -> str:
    if run.step is None:
        return ""
    return f"{run.step}/{run.steps}" if run.steps else str(run.step)


def _when(iso: str) -> str:
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M") if iso else ""


def _event(event: dict[str, Any]) -> str:
    at = datetime.fromisoformat(event["at"]).astimezone()
    known = {name: value for name, value in event.items() if name not in ("at", "event") and value is not None}
    known = {name: " ".join(map(str, value)) if name == "nodes" else value for name, value in known.items()}
    rest = known.get("what") or ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())
    return f"{at:%Y-%m-%d %H:%M:%S}  {event['event']}{f': {rest}' if rest else ''}"


def sweep_table(paths: SweepPaths, cells: Sequence[Run]) -> Table:
    """Return one line per cell, in the order in which the cells were requested."""
    table = Table(
        title=escape(f"Sweep {paths.root.name}: {states_text(cells)}"),
        title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold",
    )  # fmt: skip
    for column in ("cell", "state", "step", "loss", "job", "run", ""):
        table.add_column(column, no_wrap=column not in ("cell", "run", ""), overflow="fold")
    for cell in cells:
        table.add_row(
            escape(cell.cell or cell.name),
            f"[{COLOURS[cell.state]}]{cell.state.value}[/]",
            step_text(cell),
            "" if cell.loss is None else f"{cell.loss:.4f}",
            cell.job or cell.kind,
            escape(_named_from(paths, cell)),
            escape(cell.detail),
        )
    return table


def states_text(runs: Sequence[Run]) -> str:
    """Return ``8 cells: 6 done, 1 failed, 1 impossible``."""
    counted = Counter(run.state for run in runs)
    parts = [f"{counted[state]} {state.value}" for state in State if counted[state]]
    return f"{len(runs)} cell{'' if len(runs) == 1 else 's'}: {', '.join(parts)}"


def what_next(paths: SweepPaths, submitted: Sequence[str], known: int) -> str:
    """Return what was started, and the commands to use next."""
    name = called(paths.root)
    arrays = dict.fromkeys(job.partition("_")[0] for job in submitted)
    lines: list[str] = []
    if arrays:
        jobs = f"job{'' if len(arrays) == 1 else 's'} {', '.join(arrays)}"
        lines.append(f"Submitted {len(submitted)} cell{'' if len(submitted) == 1 else 's'} as Slurm {jobs}.")
    if known:
        lines.append(f"{known} of this content had been done, or are under way, and did not begin again.")
    lines += [f"  launch runs {name}", f"  launch report {name}"]
    if arrays:
        lines.append(f"  launch cancel {name}")
    return "\n".join(lines)


def impossible_lines(cells: Sequence[Run]) -> list[str]:
    return [f"launch: {cell.cell}: {cell.detail}" for cell in cells if cell.state is State.impossible]


def _named_from(paths: SweepPaths, cell: Run) -> str:
    """Return the run's name, preceded by its sweep's if that is another one."""
    if not cell.dir or Path(cell.dir).parent == paths.root:
        return cell.name
    return f"{Path(cell.dir).parent.name}/{cell.name}"
