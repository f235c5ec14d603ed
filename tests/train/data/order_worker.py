"""Trains the tasks of order_tasks.py on two ranks; started by torchrun in test_sample_order_ranks.py.

argv[1]: cases as JSON, "TASK OPTION ...". ``stop=N``: the job is stopped after N windows and started again. Prints one
JSON object from rank 0: by case, for each rank its micro-batches, and the records; or the error that it ended with.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from launcher.errors import LauncherError
from launcher.plan.run_plan import TaskPlan
from launcher.rundir.files import value_from_json
from launcher.train.inspection.task_probe import probe
from launcher.train.trainer import train
from launcher.train.world import World
from tests.helpers import inspection_of, make_plan
from tests.infra.workers import leave_group, print_on_rank_0
from tests.train.data import order_tasks

torch.set_num_threads(1)
COMMON = (
    "batch.global_size=24", "batch.micro_size=3", "train.epochs=2", "schedule=constant", "run.calibrate_s=0",
    "optimizer=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9", "optimizer.weight_decay=0",
    "cluster.workers_per_node=2", "train.loader_workers=0",
)  # fmt: skip


def run(place: Path, name: str, *options: str) -> dict[str, Any]:
    stops = [int(option.removeprefix("stop=")) for option in options if option.startswith("stop=")]
    overrides = [option for option in options if not option.startswith("stop=")]
    fields = probe(inspection_of(f"{order_tasks.__name__}.{name}"))
    task = dataclasses.replace(value_from_json(TaskPlan, fields), batch_norms=0)
    plan = make_plan(*COMMON, *overrides, run_dir=str(place.resolve()), task=task)
    place.mkdir(exist_ok=True)
    order_tasks.SEEN.clear()
    order_tasks.Texts.reads = 0
    try:
        for after in stops:
            windows = itertools.count(1)
            train(plan, lambda: next(windows) >= after)  # noqa: B023
        train(plan, lambda: False)
    except LauncherError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    record = place / "metrics.jsonl"
    return {
        "seen": [*order_tasks.SEEN], "reads": order_tasks.Texts.reads,
        "records": [json.loads(line) for line in record.read_text().splitlines()],
    }  # fmt: skip


def main() -> None:
    results = {case: run(Path(f"run{n}"), *case.split()) for n, case in enumerate(json.loads(sys.argv[1]))}
    everyone: list[dict[str, Any]] = World.here().of_all(results)
    print_on_rank_0({case: [each[case] for each in everyone] for case in results})
    leave_group()


if __name__ == "__main__":
    main()
