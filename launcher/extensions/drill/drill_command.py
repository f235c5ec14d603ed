"""`launch drill [key=value ...]`: interrupt the job in several ways and compare what it has learned."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.cli.overrides import (
    print_progress,
    print_result,
    signals_as_interrupt,
    take_flag,
    take_value,
    with_config,
)
from launcher.cli.train import require_new_name
from launcher.config.schema import ClusterKind, Config
from launcher.errors import ConfigError, RunError, UserError
from launcher.extensions.drill.verdict import Difference, DrillOutcome, DrillResult, InterruptedRun
from launcher.launch import local
from launcher.launch.planner import plan_job
from launcher.launch.slurm import client
from launcher.plan.clusters import cluster_of
from launcher.quantities import count
from launcher.report.tables import named_lines, near, verdict_text
from launcher.rundir.files import write_json
from launcher.rundir.paths import DrillPaths

FLAGS = ("--json", "--windows", "--help", "--cfg", "--config-dir", "--config-name")
_FEWEST, _DEFAULT, _MOST = 4, 8, 4096  # windows of each run of a drill

_DRILL_HELP = """\
launch drill [key=value ...] [--windows N] [--json]: tests whether the job survives preemption and kills.

Takes the overrides of `launch train`. Runs the job's first windows without interruption, then once for each kind of
interruption: stopped and resumed, one worker killed, all processes killed and resumed; with cluster=slurm also
requeued. Compares each run's checkpoints with those of the first, bit by bit. The result is in
run.dir/NAME/drill.json, beside the runs.
Exit status: 0 nothing is lost; 1 something is lost, or the job fails without interruption; 2 the input is wrong.
"""


def launch_drill(arguments: list[str]) -> int:
    """Return exit status 0 if every interrupted run ended like the undisturbed one, as far as that is reproducible."""
    as_json = take_flag("--json", arguments)
    windows = _windows(take_value("--windows", arguments))
    if {"--help", "-h"} & set(arguments):
        print(_DRILL_HELP)
    elif {"-m", "--multirun"} & set(arguments):
        raise UserError("launch drill -m: drills one job at a time.\n  Leave -m out.")

    def act(config: Config, yaml: str) -> int:
        return _drill(config, yaml, windows, as_json=as_json)

    return with_config("drill", arguments, act)


def _windows(text: str | None) -> int:
    if text is None:
        return _DEFAULT
    if not text.isdecimal() or not _FEWEST <= int(text) <= _MOST:
        raise UserError(
            f"--windows {text}: must be a number of windows from {_FEWEST} to {_MOST}: two checkpoints, and a step "
            f"after each.\n  Without it: {_DEFAULT}, and more if these end too soon to be interrupted."
        )
    return int(text)


def _drill(config: Config, yaml: str, windows: int, *, as_json: bool) -> int:
    from launcher.extensions.drill.backends import LocalBackend, SlurmBackend
    from launcher.extensions.drill.runner import Drill, Length, shortened

    _require_drillable(config)
    require_new_name(config)
    plan = plan_job(dataclasses.replace(config, trackers=[]))
    if plan.sites is not None:
        plan.sites.refuse("`launch drill` compares the checkpoints of one site only.")
    if config.run.name is None:
        directory = Path(plan.run.dir).with_name(f"drill-{plan.run.name}")
        plan = plan.as_run(dataclasses.replace(plan.run, name=directory.name, dir=str(directory)))
    plan, changed = shortened(plan)
    paths = DrillPaths(Path(plan.run.dir))
    local.make_directory(plan.run)
    print_progress(f"Drill {plan.run.name}. Differences from `launch train`: {'; '.join(changed)}; no trackers.")
    backend = LocalBackend() if plan.cluster.slurm is None else SlurmBackend()
    try:
        with signals_as_interrupt():
            result = Drill(plan, changed, yaml, backend, print_progress).run(Length(windows))
    except UserError:
        if not any(paths.root.iterdir()):  # nothing was started
            paths.root.rmdir()
        raise
    except RunError as error:
        print(f"launch: {error}\n  Its runs are in {paths.root}.", file=sys.stderr)
        return error.exit_status
    fields = dataclasses.asdict(result) | {"exit_status": result.exit_status, "dir": str(paths.root)}
    write_json(paths.result, fields)
    print_result(fields, drill_parts(result, paths.root), as_json=as_json)
    return result.exit_status


def _require_drillable(config: Config) -> None:
    kind = config.cluster.kind
    if cluster_of(kind).typed_on_each_host:
        raise ConfigError(
            "cluster", kind, "has no scheduler that restarts a job, so there is nothing to drill.",
            "Drill it with cluster=local on one of the hosts, or with cluster=slurm.",
        )  # fmt: skip
    if not config.checkpoint.enabled:
        raise ConfigError(
            "checkpoint.enabled", False, "no checkpoint is saved, so no progress survives an interruption.",
            "Leave it out: `launch drill` saves into a directory of its own.",
        )  # fmt: skip
    if kind == ClusterKind.slurm:
        client.require()


_DRILL_COLOURS = {DrillOutcome.survives: "bold green", DrillOutcome.varies: "bold yellow"}


def drill_parts(drilled: DrillResult, directory: Path) -> Iterator[RenderableType]:
    """Yield the drill's parts in printing order, from the job to the verdict.

    Args:
        directory: of the drill.
    """
    table, add = named_lines("Drill")
    for name, text in drilled.job.items():
        add(name, text)
    windows = f"{count(drilled.windows, 'window')}, saved every {drilled.every}"
    add("each run", f"{windows}; undisturbed {drilled.run_s:.1f} s")
    add("cold start", f"{drilled.cold_start_s:.1f} s from the start to the first step")
    add("files", near(directory))
    yield table
    yield ""
    yield _interruption_table(drilled)
    for interruption in drilled.interrupted:
        yield from _details(interruption)
    if (repeated := drilled.rerun_difference) is not None:
        yield Text(f"undisturbed run repeated: {'bit-identical' if repeated.identical else _difference(repeated)}")
    yield ""
    colour = _DRILL_COLOURS.get(drilled.outcome, "bold red")
    yield verdict_text(f"This job {drilled.outcome.value}. ", colour, drilled.reason)


def _interruption_table(drilled: DrillResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("interruption", "at step", "resumed after", "repeated", "recovery", "of a cold start", "result"):
        table.add_column(column, justify="left" if column in ("interruption", "result") else "right", no_wrap=True)
    for interruption in drilled.interrupted:
        fault = interruption.fault(drilled.rerun_difference)
        recovery = "" if interruption.recovery_s is None else f"{interruption.recovery_s:.1f} s"
        share = "" if interruption.recovery_s is None else f"{interruption.recovery_s / drilled.cold_start_s:.2f}x"
        steps = (interruption.at_step, interruption.from_step, interruption.repeated)
        numbers = ["" if step is None else str(step) for step in steps]
        result, style = escape(_result(interruption)), "red" if fault else None
        table.add_row(interruption.kind.value, *numbers, recovery, share, result, style=style)
    return table


def _result(interruption: InterruptedRun) -> str:
    if interruption.problem:
        return "did not recover"
    if interruption.left:
        return "left something behind"
    assert interruption.difference is not None
    return "bit-identical" if interruption.difference.identical else "differs"


def _details(interruption: InterruptedRun) -> Iterator[Text]:
    """Yield the details of an interruption that do not fit into the table."""
    saving = "" if interruption.saving_s is None else f"; it saved and ended {interruption.saving_s:.1f} s later"
    yield Text(f"{interruption.kind.value}: {interruption.what}{saving}.", style="dim")
    if interruption.problem:
        yield Text(f"  {interruption.problem}", style="red")
    if interruption.left:
        yield Text(f"  left behind: {', '.join(interruption.left)}", style="red")
    if interruption.difference is not None and not interruption.difference.identical:
        yield Text(f"  {_difference(interruption.difference)}", style="red")


def _difference(difference: Difference) -> str:
    parts = [part for part in (difference.steps, difference.figure) if part]
    if difference.differing:
        parts.append(
            f"{difference.differing} of {difference.tensors} tensors differ, the first is {difference.first}: "
            f"at most by {difference.absolute:.1e}, {difference.relative:.1e} of the tensor; parameters by "
            f"{difference.norm:.1e} in norm"
        )
    return "; ".join(parts)
