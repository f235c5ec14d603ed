"""`launch verify`, `drill` and `doctor`: test a job's gradient, its recovery, and the machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from launcher.cli.overrides import signals_as_interrupt, take_flag, take_value, with_config
from launcher.config.choices import OuterKind
from launcher.config.schema import ClusterKind, Config, RunConfig
from launcher.errors import ConfigError, RunError, UserError
from launcher.launch import local
from launcher.launch.peers import Peers
from launcher.launch.planner import initial_weights, plan_job
from launcher.launch.slurm import client
from launcher.plan.run_plan import RunPlan
from launcher.report import live, tables, verdicts
from launcher.rundir.files import read_json, value_from_json, write_json
from launcher.rundir.paths import DrillPaths

if TYPE_CHECKING:
    from rich.console import RenderableType

VERIFY_COMMAND = ("-P", "-m", "launcher.verify.verify_worker")
_FEWEST, _DEFAULT, _MOST = 4, 8, 4096  # windows of each run of a drill

_VERIFY_HELP = """\
launch verify [key=value ...] [--json]: compares the job's accumulated gradient with that of one big batch.

Takes the overrides of `launch train`. Runs the job's first windows and a short one on its ranks, on this machine, and
compares their gradients in fp32 with each window as one batch in one process. Trains nothing and leaves no files.
Exit status: 0 equal up to rounding; 1 different, or not comparable, or training would fail; 2 the input is wrong,
which includes what `launch train` refuses with status 2.
"""
_DRILL_HELP = """\
launch drill [key=value ...] [--windows N] [--json]: tests whether the job survives preemption and kills.

Takes the overrides of `launch train`. Runs the job's first windows without interruption, then once for each kind of
interruption: stopped and resumed, one worker killed, all processes killed and resumed; with cluster=slurm also
requeued. Compares each run's checkpoints with those of the first, bit by bit. The result is in
run.dir/NAME/drill.json, beside the runs.
Exit status: 0 nothing is lost; 1 something is lost, or the job fails without interruption; 2 the input is wrong.
"""


def launch_verify(arguments: list[str]) -> int:
    """Return exit status 0 if the gradient is that of the big batch, 1 if it is not or cannot be compared."""
    as_json = take_flag("--json", arguments)
    if {"--help", "-h"} & set(arguments):
        print(_VERIFY_HELP)

    def act(config: Config, yaml: str) -> int:
        if config.cluster.kind is not ClusterKind.local:
            raise ConfigError(
                "cluster", config.cluster.kind, "`launch verify` runs its ranks on this machine.",
                "Use cluster=local with cluster.workers_per_node=RANKS, the job's number of ranks or fewer: a window "
                "is the same in every world size. On a cluster, type that in an allocation.",
            )  # fmt: skip
        if config.outer.kind is not OuterKind.none:
            raise ConfigError(
                "outer", config.outer.kind, "`launch verify` compares the gradient of one window with that of one big "
                "batch, and a window of outer steps is one of each site.",
                "Verify the window of a site: leave outer out, with the site's ranks and share of the global batch.",
            )  # fmt: skip
        directory, keep = Path(tempfile.mkdtemp(prefix="launch-verify-")), False
        try:
            with signals_as_interrupt():  # otherwise SIGTERM would leave the directory behind
                status, keep = _verify(_verify_plan(config, directory), yaml, as_json=as_json)
            return status
        finally:
            if not keep:
                shutil.rmtree(directory, ignore_errors=True)

    return with_config("verify", arguments, act)


def _verify_plan(config: Config, directory: Path) -> RunPlan:
    """Return the plan of `launch train` in ``directory``, without calibration, mirror and checkpoints."""
    run = RunConfig(name="verify", dir=str(directory), calibrate_s=0.0)
    weights = initial_weights(config, str(Path.cwd()))  # a name of a run is searched in the run.dir of the job
    checkpoint = dataclasses.replace(config.checkpoint, init_from=weights and weights.path)
    plan = plan_job(dataclasses.replace(config, run=run, trackers=[], checkpoint=checkpoint))
    return dataclasses.replace(
        plan,
        command=VERIFY_COMMAND,
        cluster=dataclasses.replace(plan.cluster, max_restarts=0),
        # no hang detection: work between two windows does not count as progress
        train=dataclasses.replace(plan.train, hang_timeout=None),
        checkpoint=dataclasses.replace(plan.checkpoint, enabled=False),
    )


def _verify(plan: RunPlan, yaml: str, *, as_json: bool) -> tuple[int, bool]:
    """Return the exit status, and whether to keep the directory, which has the logs of failed workers."""
    from launcher.verify.certificate import Certificate

    local.create(plan, yaml)
    output = live.RankOutput(plan.paths.rank_log(0))  # in stderr, because a script may read the result
    verdict = local.run_job(plan, live.LogFollower(output, sys.stderr), Peers())
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary), file=sys.stderr)
        return verdict.status, True
    fields = read_json(plan.paths.certificate)
    if fields is None:  # stopped
        return verdict.status, False
    certificate: Certificate = value_from_json(Certificate, fields)
    status = certificate.exit_status
    _show(fields | {"exit_status": status}, verdicts.certificate_parts(certificate), as_json=as_json)
    return status, False


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
    from launcher.drill.backends import LocalBackend, SlurmBackend
    from launcher.drill.runner import Drill, Length, shortened

    _require_drillable(config)
    plan = plan_job(dataclasses.replace(config, trackers=[]))
    if config.run.name is None:
        directory = Path(plan.run.dir).with_name(f"drill-{plan.run.name}")
        plan = plan.as_run(dataclasses.replace(plan.run, name=directory.name, dir=str(directory)))
    plan, changed = shortened(plan)
    paths = DrillPaths(Path(plan.run.dir))
    local.make_directory(plan.run)
    _progress(f"Drill {plan.run.name}. Differences from `launch train`: {'; '.join(changed)}; no trackers.")
    backend = LocalBackend() if plan.cluster.slurm is None else SlurmBackend()
    try:
        with signals_as_interrupt():
            result = Drill(plan, changed, yaml, backend, _progress).run(Length(windows))
    except UserError:
        if not any(paths.root.iterdir()):  # nothing was started
            paths.root.rmdir()
        raise
    except RunError as error:
        print(f"launch: {error}\n  Its runs are in {paths.root}.", file=sys.stderr)
        return error.exit_status
    fields = dataclasses.asdict(result) | {"exit_status": result.exit_status, "dir": str(paths.root)}
    write_json(paths.result, fields)
    _show(fields, verdicts.drill_parts(result, paths.root), as_json=as_json)
    return result.exit_status


def _require_drillable(config: Config) -> None:
    kind = config.cluster.kind
    if kind is ClusterKind.hosts:
        raise ConfigError(
            "cluster", kind, "has no scheduler that restarts a job, so there is nothing to drill.",
            "Drill it with cluster=local on one of the hosts, or with cluster=slurm.",
        )  # fmt: skip
    if config.outer.kind is not OuterKind.none:
        raise ConfigError(
            "outer", config.outer.kind, "`launch drill` compares the checkpoints of one site only.", "Leave it out."
        )
    if not config.checkpoint.enabled:
        raise ConfigError(
            "checkpoint.enabled", False, "no checkpoint is saved, so no progress survives an interruption.",
            "Leave it out: `launch drill` saves into a directory of its own.",
        )  # fmt: skip
    if kind is ClusterKind.slurm:
        client.require()


def launch_doctor(arguments: list[str]) -> int:
    """Check this machine, or the cluster, and print the report; return 0 if no check failed, else 1."""
    as_json = take_flag("--json", arguments)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        from launcher.doctor.check import exit_status
        from launcher.doctor.examination import examine

        with signals_as_interrupt():
            checks = examine(config, _progress)
        parts = [verdicts.checks_table(checks), Text(verdicts.checks_verdict(checks))]
        _show([dataclasses.asdict(check) for check in checks], parts, as_json=as_json)
        return exit_status(checks)

    return with_config("doctor", arguments, act)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # stderr, because a script may read the result


def _show(fields: Any, parts: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print a result: ``fields`` as JSON, or ``parts`` for a reader."""
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console = live.console()
    for part in parts:
        console.print(part)
