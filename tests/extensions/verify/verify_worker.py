"""`launch verify`'s ranks on several tasks in turn, run by torchrun in test_verify.py.

Each argument is a task of verify_tasks.py or mistaken_tasks.py, and overrides. Rank 0 prints a JSON object for each:
its certificate, or the error that it ended with.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch.distributed as dist

from launcher.errors import LauncherError
from launcher.extensions.verify.verify_worker import verify
from launcher.plan.run_plan import RunPlan
from launcher.train.world import World
from tests.extensions.verify import mistaken_tasks, verify_tasks
from tests.helpers import make_plan

OWN = ("precision=fp32", "batch.global_size=12", "batch.micro_size=2", "cluster.device=cpu")


def plan_of(name: str, overrides: list[str], ranks: int) -> RunPlan:
    params = dict(o.removeprefix("task.").split("=") for o in overrides if o.startswith("task."))
    others = [o for o in overrides if not o.startswith("task.")]
    length = None if "Stream" in name or "Shard" in name else 29
    plan = make_plan(*OWN, f"cluster.workers_per_node={ranks}", *others, samples=length)
    module = verify_tasks if hasattr(verify_tasks, name) else mistaken_tasks
    task = dataclasses.replace(plan.task, target=f"{module.__name__}.{name}", params=params)
    return dataclasses.replace(plan, task=task)


def main(lines: list[str]) -> None:
    world = World.here()
    for number, line in enumerate(lines):
        task, *overrides = line.split()
        # a group of its own for each: torch's own meeting place serves one
        store = dist.FileStore(f"store{number}", world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        found: dict[str, Any] = {}
        try:
            certificate = verify(plan_of(task, overrides, world.size), world)
            found = dataclasses.asdict(certificate) if certificate is not None else {}
        except LauncherError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
            dist.destroy_process_group()
        if world.rank == 0:  # the group is gone by now
            print(json.dumps({"line": line, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
