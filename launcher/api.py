"""The public Python API: plans, jobs and sweeps."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from launcher.config.hydra import compose, compose_with_yaml
from launcher.config.key_facts import typed
from launcher.config.multirun import RequestedCell
from launcher.config.schema import Config, Device, PrecisionKind
from launcher.errors import ConfigError, SiteError
from launcher.launch import local
from launcher.launch.outer_job import require_one_copy
from launcher.launch.planner import initial_weights, new_run, plan_job, run_of_script
from launcher.launch.slurm import submit as slurm
from launcher.plan import host
from launcher.plan.clusters import Peers, cluster_of, require_at_hand
from launcher.plan.host import Site
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.record.report_entry import leave_entry
from launcher.report.live import NoDisplay
from launcher.rundir.files import read_json
from launcher.rundir.job_end import STOPS
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs import control
from launcher.runs.status import Run
from launcher.sweeps.conductor import Conductor
from launcher.sweeps.reuse import look_at_sweeps
from launcher.trackers.installed import require_trackers


def make_plan(
    overrides: Sequence[str] | Config = (),
    *,
    samples: int | EllipsisType | None = ...,
    tokens_per_sample: int | None = None,
) -> RunPlan:
    """Return the plan for a training loop of your own; call it in each worker of torchrun, or in a process alone.

    The model is not inspected here: strategy.sync=auto selects the policy that sends the fewest bytes, regardless of
    memory.

    The run's name and directory are those of `launch run`, or under torchrun those of run.name and run.dir.

    Args:
        overrides: as on the command line, or a Config; the task group is not used.
        samples: the length of your dataset; None for a stream. It must be given.
        tokens_per_sample: tokens of each sample, for batch.global_tokens.

    Raises:
        ConfigError: ``samples`` is left out; impossible values, alone or in combination.
        SiteError: one of several processes that torchrun has not started.
    """
    from launcher.train.world import World

    if isinstance(samples, EllipsisType):
        raise ConfigError(
            "make_plan(samples=...)", None, "is missing, the number of samples in an epoch.",
            "Write samples=len(dataset); samples=None for a stream, or for batches whose number is not known.",
        )  # fmt: skip
    config = overrides if isinstance(overrides, Config) else compose(overrides)
    site = Site.here()
    world = World.here()
    run = run_of_script(os.environ) or new_run(config.run, "own_loop", site.cwd)
    started = world.size // world.local_size, world.local_size
    if started[0] == 1:  # on several hosts the engine resolves precision=auto on all of them together
        device = config.cluster.device
        if device is Device.auto:
            device = Device.cuda if site.gpus else Device.cpu
        site = dataclasses.replace(site, bf16=host.computes(PrecisionKind.bf16, device, os.environ))
    plan = solve(config, site, TaskPlan.unknown(samples, tokens_per_sample), run, started)
    require_trackers(config, os.environ)
    before = RunPlan.load(plan.paths.loop_plan) if plan.paths.loop_plan.exists() else None
    if before is not None and before.initial is not None and before.checkpoint.init_from == config.checkpoint.init_from:
        return dataclasses.replace(plan, initial=before.initial)  # they may be gone: the run has its own checkpoints
    return dataclasses.replace(plan, initial=initial_weights(config, site.cwd))


@dataclass(frozen=True)
class Job:
    """Submitted or finished run. ``dir``: its directory."""

    dir: Path

    @property
    def name(self) -> str:
        return self.dir.name

    def look(self) -> Run:
        """Return the current state."""
        return control.status_of(RunPaths(self.dir))

    def wait(self, watch: Callable[[Run], None] = lambda _: None) -> Run:
        """Wait until the run has ended, through every requeue, and return its final state.

        Args:
            watch: called periodically with the current state.
        """
        return control.wait_for([RunPaths(self.dir)], lambda runs: watch(runs[0]))[0]

    def summary(self) -> dict[str, Any]:
        """Return the contents of summary.json; empty before the end."""
        return read_json(RunPaths(self.dir).summary) or {}


@dataclass(frozen=True)
class Study:
    """Started sweep. ``dir``: its directory."""

    dir: Path

    def cells(self) -> list[Run]:
        """Return the state of each cell, in request order."""
        return look_at_sweeps([SweepPaths(self.dir)])[str(self.dir)]


def submit(overrides: Sequence[str] = ()) -> Job:
    """Start the job of ``launch train OVERRIDES``; return when it is queued (Slurm) or has ended (this machine).

    Raises:
        UserError: invalid input, or torchrun, srun or mpirun has started several copies of this process; nothing was
            started.
    """
    require_one_copy(None, ["train", *overrides], in_python=True)
    config, yaml = compose_with_yaml(overrides)
    require_at_hand(config.cluster)
    if cluster_of(config.cluster.kind).typed_on_each_host:
        raise SiteError(
            f"cluster={config.cluster.kind}: cannot be started from Python.\n  Type `launch train` on each host."
        )
    plan = plan_job(config)
    if plan.cluster.slurm is not None:
        plan, _ = slurm.submit_job(plan, yaml)
    else:
        local.create(plan, yaml)
        if _run_here(plan) in STOPS:  # stopped by the user or preempted
            raise KeyboardInterrupt
    return Job(plan.paths.root)


def sweep(
    over: Mapping[str, Sequence[object]],
    overrides: Sequence[str] = (),
    *,
    wait: bool = True,
    watch: Callable[[Sequence[Run]], None] = lambda _: None,
) -> Study:
    """Start a run for each combination of the values of ``over``, as ``launch train -m`` does.

    Args:
        over: keys, and the values that each takes.
        overrides: applied to all runs.
        wait: whether to wait for Slurm jobs; runs on this machine have always ended on return.
        watch: called periodically with the state of the Slurm jobs.

    Raises:
        UserError: no cell can start, a value is of the wrong type, or this process is one of several copies.
    """
    words_of = {key: [typed(value) for value in values] for key, values in over.items()}
    varying = tuple(f"{key}={','.join(values)}" for key, values in words_of.items())
    require_one_copy(None, ["train", "-m", *overrides, *varying], in_python=True)
    cells: list[RequestedCell] = []
    for values in itertools.product(*words_of.values()):
        words = tuple(f"{key}={value}" for key, value in zip(words_of, values, strict=True))
        cells.append(RequestedCell(words, *compose_with_yaml([*overrides, *words])))
    conductor = Conductor(["-m", *overrides, *varying], _run_here, watch, lambda _: None, wait=wait)
    conductor.begin(cells, False)
    assert conductor.paths is not None
    return Study(conductor.paths.root)


def _run_here(plan: LaunchPlan | RunPlan) -> int:
    verdict = local.run_job(plan, NoDisplay(), Peers())
    leave_entry(plan.paths)
    local.report_outcome(verdict.plan, verdict.summary)
    return verdict.status
