"""Run by torchrun in test_load.py and others: argv[1] is a file of jobs, one JSON object a line, run in turn.

Of each job: ``run`` (its directory), ``overrides``, ``task``. If they are there: ``target``; ``incarnation``;
``stop``: windows after which rank 1 asks for the end; ``superseded``: windows after which a newer attempt begins;
``forced``: keys; ``past``: the stages of batch.ramp; ``raises``: the error that it must end with; ``dies``: the save in
which it is killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import LauncherError
from launcher.plan.batch import RampStage
from launcher.plan.run_plan import RunPlan
from launcher.rundir.fencing import INCARNATION, Fence, Incarnation
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import file_format
from launcher.train.engine import calibration
from launcher.train.trainer import train
from launcher.train.world import World
from tests.helpers import make_plan
from tests.infra.workers import leave_group

torch.set_num_threads(1)
calibration.MAX_ROUNDS = 3
Job = dict[str, Any]


def say(line: str) -> None:
    """Print in one write: the other rank's lines come to the same pipe."""
    print(f"{line}\n", end="", flush=True)


def plan_of(job: Job) -> RunPlan:
    streams = job["task"].get("streams", False)
    plan = make_plan(
        *job["overrides"], f"cluster.workers_per_node={World.here().size}", run_dir=job["run"],
        samples=None if streams else job["task"].get("samples", 90),
    )  # fmt: skip
    target = job.get("target", "tests.train.checkpoint.resume_task.Noisy")
    own = "optimizer" in job["task"]
    task = dataclasses.replace(plan.task, target=target, params=job["task"], own_optimizer=own)
    ramp = tuple(RampStage(windows=windows, global_size=size) for windows, size in job.get("past", []))
    batch = dataclasses.replace(plan.batch, ramp=ramp or plan.batch.ramp)
    return dataclasses.replace(plan, task=task, batch=batch, forced=tuple(job.get("forced", ())))


def die_while_saving(count: int) -> None:
    """In the middle of that save: tensors are written, the manifest is not."""
    write, left = file_format.write_manifest, count

    def last_words(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    file_format.write_manifest = last_words


def train_job(job: Job) -> None:
    rank, asked = min(1, World.here().size - 1), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        if asked == job.get("superseded"):
            Fence(RunPaths(Path(job["run"])), Incarnation(0, 7)).claim()
        return asked == job.get("stop") and World.here().rank == rank

    if "dies" in job:
        die_while_saving(job["dies"])
    train(plan_of(job), stop)


def run_all(run: Callable[[Job], None] = train_job, after: Callable[[Job], None] = lambda _: None) -> None:
    """Run each job by ``run``, and then ``after``."""
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        Path(job["run"]).mkdir(exist_ok=True)
        os.environ[INCARNATION] = job.get("incarnation", "0.0")
        try:
            run(job)
        except LauncherError as error:
            if type(error).__name__ != job.get("raises"):
                raise
            say(f"{type(error).__name__} on rank {World.here().rank} of {job['run']}: {error}")
        else:
            assert "raises" not in job, f"{job['run']} went on"
        after(job)
    if dist.is_initialized():  # otherwise nothing was begun
        leave_group()


if __name__ == "__main__":
    run_all()
