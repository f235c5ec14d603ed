"""Run by torchrun in test_resume.py: argv[1] is a file of jobs, one JSON object a line, run one after the other.

Of each job: ``run`` (its directory), ``overrides``, ``task``, ``stop``: windows after which rank 1 asks for the end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.plan import RunPlan
from launcher.train.loop import train
from launcher.train.world import World
from tests.helpers import make_plan

torch.set_num_threads(1)


def plan_of(job: dict[str, Any]) -> RunPlan:
    streams = job["task"].get("streams", False)
    plan = make_plan(
        *job["overrides"], f"cluster.workers_per_node={World.here().size}", run_dir=job["run"],
        samples=None if streams else job["task"].get("samples", 90),
    )  # fmt: skip
    task = dataclasses.replace(plan.task, target="tests.train.resume_task.Noisy", params=job["task"])
    return dataclasses.replace(plan, task=task)


def main() -> None:
    rank = min(1, World.here().size - 1)
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        Path(job["run"]).mkdir(exist_ok=True)
        asked = 0

        def stop(after: int | None = job.get("stop")) -> bool:
            nonlocal asked
            asked += 1
            return asked == after and World.here().rank == rank

        train(plan_of(job), stop)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
