"""Data built from random numbers, on two ranks; run by torchrun in test_fingerprint.py.

argv[1]: cases as JSON, "TASK OPTION ...". Prints one JSON object from rank 0: by case, what each rank has seen, or the
error that it ended with.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import LauncherError
from launcher.train.trainer import train
from tests.helpers import make_plan
from tests.infra.workers import leave_group, print_on_rank_0
from tests.train.data import data_tasks
from tests.train.data.data_tasks import TRAINED, rank

torch.set_num_threads(1)
COMMON = (
    "precision=fp32", "batch.global_size=16", "batch.micro_size=4", "train.epochs=1", "train.steps=null",
    "schedule=constant", "checkpoint.enabled=false", "run.calibrate_s=0", "cluster.workers_per_node=2",
)  # fmt: skip


def run(name: str, *options: str) -> dict[str, Any]:
    """Run the task ``name``. Returns the samples and figures of this rank."""
    random.seed()  # as in a process that has just started
    streams = "Stream" in name or name == "Sharded"
    params = dict(option.removeprefix("task.").split("=") for option in options if option.startswith("task."))
    overrides = [option for option in options if not option.startswith("task.")]
    with tempfile.TemporaryDirectory() as place:
        plan = make_plan(*COMMON, *overrides, run_dir=place, samples=None if streams else TRAINED)
        target = f"{data_tasks.__name__}.{name}"
        task = dataclasses.replace(plan.task, target=target, params={key: int(value) for key, value in params.items()})
        try:
            train(dataclasses.replace(plan, task=task), lambda: False)
        except LauncherError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        record = Path(place, "metrics.jsonl")
        lines = [json.loads(line) for line in record.read_text().splitlines()] if rank() == 0 else []
    made = data_tasks.MADE[-1]
    return {"built": made.built, **made.seen, "losses": [line.get("eval/loss") for line in lines]}


def main() -> None:
    seen = {case: run(*case.split()) for case in json.loads(sys.argv[1])}
    everyone: list[dict[str, Any]] = [seen] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    print_on_rank_0({case: [each[case] for each in everyone] for case in seen})
    leave_group()


if __name__ == "__main__":
    main()
