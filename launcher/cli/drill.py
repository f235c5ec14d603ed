"""`launch drill`: check that this job ends with the same parameters whatever is interrupted or killed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import leaves_in_order, take, take_value, with_config
from launcher.config.schema import ClusterKind, Config, WandbConfig, WandbMode
from launcher.errors import ConfigError, RunError, UserError

if TYPE_CHECKING:
    from launcher.drill.backends import Backend
    from launcher.plan.run_plan import RunPlan


_LEAST, _USUAL, _MOST = 4, 8, 4096

_HELP = """\
launch drill [key=value ...] [--windows N] [--json]: does this job survive preemption and kills?

Takes the overrides of `launch train`. Runs the job's first windows undisturbed, then once for each interruption:
preempted and resumed, a worker killed, everything killed and resumed; with cluster=slurm requeued, too. Each run is
compared with the undisturbed one, bit by bit. The result is in run.dir/NAME/drill.json, beside the runs.
Exit status: 0 nothing is lost; 1 something is lost, or the job fails by itself; 2 the input is wrong.
"""


def drill(arguments: list[str]) -> int:
    """Return exit status 0 if every interrupted run ended like the undisturbed one, as far as that is reproducible."""
    as_json = take("--json", arguments)
    windows = _windows(take_value("--windows", arguments))
    if {"--help", "-h"} & set(arguments):
        print(_HELP)
    elif {"-m", "--multirun"} & set(arguments):
        raise UserError("launch drill -m: drills one job at a time.\n  Leave -m out.")

    def act(config: Config, yaml: str) -> int:
        return _drill(config, yaml, windows, as_json=as_json)

    return with_config("drill", arguments, act)


def _windows(text: str | None) -> int:
    if text is None:
        return _USUAL
    if not text.isdecimal() or not _LEAST <= int(text) <= _MOST:
        raise UserError(
            f"--windows {text}: must be a number of windows from {_LEAST} to {_MOST}: two checkpoints, and a step "
            f"after each.\n  The default is {_USUAL}, and more if the job is over too soon."
        )
    return int(text)


def _drill(config: Config, yaml: str, windows: int, *, as_json: bool) -> int:
    from launcher.drill.runner import Drill, Length, shortened
    from launcher.launch import local
    from launcher.launch.planner import plan_job
    from launcher.report import live, verdicts
    from launcher.rundir.files import write_json
    from launcher.rundir.paths import DrillPaths

    _require_drillable(config)
    plan = plan_job(dataclasses.replace(config, wandb=WandbConfig(mode=WandbMode.disabled)))
    plan, changed = shortened(_named(plan, config))
    paths = DrillPaths(Path(plan.run.dir))
    local.make_directory(plan.run)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # stderr, because a script may read the result

    say(f"Drill {plan.run.name}. Other than with `launch train`: {'; '.join(changed)}; W&B is off.")
    try:
        with leaves_in_order():
            result = Drill(plan, changed, yaml, _backend(plan), say).run(Length(windows))
    except UserError:
        if not any(paths.root.iterdir()):  # nothing was started
            paths.root.rmdir()
        raise
    except RunError as error:
        print(f"launch: {error}\n  Its runs are in {paths.root}.", file=sys.stderr)
        return error.exit_status
    fields = dataclasses.asdict(result) | {"exit_status": result.exit_status, "dir": str(paths.root)}
    write_json(paths.found, fields)
    if as_json:
        print(json.dumps(fields, indent=2))
    else:
        console = live.console()
        for part in verdicts.drill_parts(result, paths.root):
            console.print(part)
    return result.exit_status


def _require_drillable(config: Config) -> None:
    from launcher.launch.slurm import client

    kind = config.cluster.kind
    if kind is ClusterKind.hosts:
        raise ConfigError(
            "cluster", kind, "has no scheduler that restarts a job, so there is nothing to drill.",
            "Drill it with cluster=local on one of the hosts, or with cluster=slurm.",
        )  # fmt: skip
    if not config.checkpoint.enabled:
        raise ConfigError(
            "checkpoint.enabled", False, "nothing is saved, so nothing survives an interruption.",
            "Leave it out: `launch drill` saves into a directory of its own.",
        )  # fmt: skip
    if kind is ClusterKind.slurm:
        client.require()


def _named(plan: RunPlan, config: Config) -> RunPlan:
    """Mark the run as a drill in its name unless the user named it."""
    if config.run.name is not None:
        return plan
    place = Path(plan.run.dir)
    name = f"drill-{place.name}"
    return dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=name, dir=str(place.with_name(name))))


def _backend(plan: RunPlan) -> Backend:
    from launcher.drill.backends import LocalBackend, SlurmBackend

    return LocalBackend() if plan.cluster.slurm is None else SlurmBackend()
