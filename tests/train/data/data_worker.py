"""Trains the tasks of a module on two ranks; started by torchrun in test_fingerprint.py and test_sample_order_ranks.py.

argv: the module, options of all cases, and cases as JSON: "TASK OPTION ...". ``task.NAME=N``: an argument of the task.
``stop=N``: the job is stopped after N windows and started again. Prints one JSON object from rank 0: by case, for each
rank what the module's ``seen()`` returns, and the records of rank 0; or the error that it ended with.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from launcher.errors import LauncherError
from launcher.train.trainer import train
from launcher.train.world import World
from tests.helpers import make_plan
from tests.infra.workers import leave_group, print_on_rank_0

torch.set_num_threads(1)
TASKS = importlib.import_module(sys.argv[1])


def run(place: Path, name: str, *options: str) -> dict[str, Any]:
    random.seed()  # as in a process that has just started
    given = [option.partition("=") for option in options]
    stops = [int(value) for key, _, value in given if key == "stop"]
    params = {key.removeprefix("task."): int(value) for key, _, value in given if key.startswith("task.")}
    overrides = [option for option in options if not option.startswith(("stop=", "task."))]
    task = TASKS.task_plan(name, params)
    plan = make_plan(*json.loads(sys.argv[2]), *overrides, run_dir=str(place.resolve()), task=task)
    place.mkdir(exist_ok=True)
    try:
        for after in stops:
            windows = itertools.count(1)
            train(plan, lambda: next(windows) >= after)  # noqa: B023
        train(plan, lambda: False)
    except LauncherError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    record = (place / "metrics.jsonl").read_text() if World.here().rank == 0 else ""
    return {**TASKS.seen(), "records": [json.loads(line) for line in record.splitlines()]}


def main() -> None:
    results = {case: run(Path(f"run{n}"), *case.split()) for n, case in enumerate(json.loads(sys.argv[3]))}
    everyone: list[dict[str, Any]] = World.here().of_all(results)
    print_on_rank_0({case: [each[case] for each in everyone] for case in results})
    leave_group()


if __name__ == "__main__":
    main()
