"""`launch verify`: check that this job's accumulated gradient is that of one big batch."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import leaves_in_order, take, with_config
from launcher.config.schema import ClusterKind, Config, RunConfig, WandbConfig, WandbMode
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.plan.run_plan import RunPlan


WORKER_COMMAND = ("-P", "-m", "launcher.verify.verify_worker")


_HELP = """\
launch verify [key=value ...] [--json]: is this job's accumulated gradient that of one big batch?

Takes the overrides of `launch train`. Runs the job's first windows and a short one on its ranks, on this machine, and
compares their gradients in fp32 with each window as one batch in one process. Nothing is trained, nothing is left.
Exit status: 0 it is, to rounding; 1 it is not, or cannot be compared, or training would fail; 2 the input is wrong.
"""


def verify(arguments: list[str]) -> int:
    """Return exit status 0 if the gradient is that of the big batch, 1 if it is not or cannot be compared."""
    as_json = take("--json", arguments)
    if {"--help", "-h"} & set(arguments):
        print(_HELP)

    def act(config: Config, yaml: str) -> int:
        _require_here(config)
        place = Path(tempfile.mkdtemp(prefix="launch-verify-"))
        keep = False
        try:
            with leaves_in_order():  # otherwise SIGTERM would leave the directory behind
                plan = _plan(config, place)
                status, keep = _run(plan, yaml, as_json=as_json)
            return status
        finally:
            if not keep:
                shutil.rmtree(place, ignore_errors=True)

    return with_config("verify", arguments, act)


def _require_here(config: Config) -> None:
    kind = config.cluster.kind
    if kind is not ClusterKind.local:
        raise ConfigError(
            "cluster", kind, "`launch verify` runs its ranks on this machine.",
            "Use cluster=local with as many ranks as the job will have (cluster.workers_per_node), or, where they do "
            "not fit, fewer: the window is the same in every world. On a cluster, type that in an allocation.",
        )  # fmt: skip


def _plan(config: Config, place: Path) -> RunPlan:
    """Return the plan of `launch train` in a temporary directory, without calibration, mirror and checkpoints."""
    from launcher.launch.planner import plan_job

    run = RunConfig(name="verify", dir=str(place), calibrate_s=0.0)
    wandb = WandbConfig(mode=WandbMode.disabled)
    plan = plan_job(dataclasses.replace(config, run=run, wandb=wandb))
    cluster = dataclasses.replace(plan.cluster, max_restarts=0)
    # no hang detection: work between two windows does not count as progress
    train = dataclasses.replace(plan.train, hang_timeout=None)
    checkpoint = dataclasses.replace(plan.checkpoint, enabled=False)
    return dataclasses.replace(plan, command=WORKER_COMMAND, cluster=cluster, train=train, checkpoint=checkpoint)


def _run(plan: RunPlan, yaml: str, *, as_json: bool) -> tuple[int, bool]:
    """Return the exit status, and whether to keep the directory, which has the logs of failed workers."""
    from launcher.launch import local
    from launcher.launch.peers import Peers
    from launcher.report import live, tables, verdicts
    from launcher.rundir.files import build, read_json
    from launcher.verify.certificate import Certificate

    local.create(plan, yaml)
    verdict = local.run(plan, live.LogDisplay(plan, sys.stderr), Peers())
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary), file=sys.stderr)
        return verdict.status, True
    fields = read_json(plan.paths.certificate)
    if fields is None:  # stopped
        return verdict.status, False
    found: Certificate = build(Certificate, fields)
    if as_json:
        print(json.dumps(fields | {"exit_status": found.exit_status}, indent=2))
    else:
        console = live.console()
        for part in verdicts.certificate_parts(found):
            console.print(part)
    return found.exit_status, False
