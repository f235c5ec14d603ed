"""Run by torchrun in test_load.py and others: argv[1] is a file of jobs, one JSON object a line, run in turn.

Of each job: ``run`` (its directory), ``overrides``, ``task``. If they are there: ``target``; ``attempt``; ``stop``:
windows after which rank 1 asks for the end; ``superseded``: windows after which a newer attempt begins; ``raises``: the
error that it must end with; ``dies``: the save in which it is killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import LauncherError
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


def plan_of(job: dict[str, Any]) -> RunPlan:
    streams = job["task"].get("streams", False)
    plan = make_plan(
        *job["overrides"], f"cluster.workers_per_node={World.here().size}", run_dir=job["run"],
        samples=None if streams else job["task"].get("samples", 90),
    )  # fmt: skip
    target = job.get("target", "tests.train.checkpoint.resume_task.Noisy")
    own = "optimizer" in job["task"]
    task = dataclasses.replace(plan.task, target=target, params=job["task"], own_optimizer=own)
    return dataclasses.replace(plan, task=task)


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


def main() -> None:
    rank = min(1, World.here().size - 1)
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        Path(job["run"]).mkdir(exist_ok=True)
        asked = 0

        def stop(job: dict[str, Any] = job) -> bool:
            nonlocal asked
            asked += 1
            if asked == job.get("superseded"):
                Fence(RunPaths(Path(job["run"])), Incarnation(0, 7)).claim()
            return asked == job.get("stop") and World.here().rank == rank

        os.environ[INCARNATION] = job.get("incarnation", "0.0")
        if "dies" in job:
            die_while_saving(job["dies"])
        try:
            train(plan_of(job), stop)
        except LauncherError as error:
            if type(error).__name__ != job.get("raises"):
                raise
            print(f"{type(error).__name__} at {job['run']}: {error}")
        else:
            assert "raises" not in job, f"{job['run']} went on"
    if not dist.is_initialized():  # nothing was begun
        return
    leave_group()


if __name__ == "__main__":
    main()
