"""A growing record without training, the tracker's process beside it, and what each store then has."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.plan.run_plan import RunPlan
from tests.helpers import make_plan, patience
from tests.infra import warm

# by step: (name, value), in the order in which the store has them
Steps = dict[int, dict[str, float]]


def record_of(step: int) -> dict[str, Any]:
    """Return the record of a step, with values of its own: an evaluation every fifth step, a nan every seventh."""
    record: dict[str, Any] = {
        "step": step,
        "train/loss": 10 / step,
        "progress/items": step * 4096,
        "train/acc@5": None if step % 7 == 0 else step / 1000,
        "time/total_s": step / 8,
    }
    return record | ({"eval/held out/loss": 11 / step} if step % 5 == 0 else {})


class Growing(threading.Thread):
    """Writer of metrics.jsonl, a record every few milliseconds until ``stop``."""

    def __init__(self, plan: RunPlan, every_s: float = 0.02) -> None:
        super().__init__(daemon=True)
        self._path, self._every_s = plan.paths.metrics, every_s
        self.step = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            self.add(1)

    def add(self, steps: int) -> None:
        with self._path.open("a") as file:
            for _ in range(steps):
                self.step += 1
                file.write(json.dumps(record_of(self.step)) + "\n")

    def stop(self) -> None:
        self._over.set()
        self.join()


def saved_plan(run_dir: Path, *overrides: str) -> RunPlan:
    """Return the plan of a run in ``run_dir``, as its tracker's processes read it."""
    plan = make_plan("precision=fp32", *overrides, run_dir=str(run_dir))
    plan.paths.logs.mkdir(parents=True)
    plan.save()
    return plan


def mirror(plan: RunPlan, tracker: str, attempt: str = "0.0", env: Mapping[str, str] | None = None) -> Any:
    """Start a tracker's process, as the agent does."""
    command = [sys.executable, "-m", "launcher.trackers.mirror", plan.run.dir, attempt, tracker]
    without = {name: value for name, value in os.environ.items() if name != "MLFLOW_ALLOW_FILE_STORE"}
    with plan.paths.tracker_log(tracker).open("ab") as log:
        return warm.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=without | dict(env or {}))


def mirror_to_the_end(plan: RunPlan, tracker: str, attempt: str = "0.0", env: Mapping[str, str] | None = None) -> int:
    """Mirror all that is recorded; the exit status."""
    process = mirror(plan, tracker, attempt, env)
    process.stdin.close()
    return process.wait(patience(60))


def status_of(plan: RunPlan, tracker: str) -> dict[str, Any]:
    path = plan.paths.tracker_status(tracker)
    return json.loads(path.read_text()) if path.exists() else {}


def kill_often(plan: RunPlan, tracker: str, kills: int, env: Mapping[str, str] | None = None) -> int:
    """Kill the tracker's process at random points while records arrive, then let one deliver the rest.

    A process lives up to twice as long as one takes to start and to deliver, which is measured first.

    Returns:
        The number of steps recorded.
    """
    rng, growing, log = random.Random(kills), Growing(plan), plan.paths.tracker_log(tracker)
    growing.add(20)
    began = time.monotonic()
    assert mirror_to_the_end(plan, tracker, env=env) == 0, log.read_text()
    whole_s = time.monotonic() - began
    growing.start()
    try:
        for _ in range(kills):
            process = mirror(plan, tracker, env=env)
            time.sleep(rng.uniform(0, 2 * whole_s))
            process.kill()
            process.communicate()
    finally:
        growing.stop()
    plan.paths.summary.write_text(json.dumps({"verdict": "done", "train/loss": 0.5}))
    assert mirror_to_the_end(plan, tracker, env=env) == 0, log.read_text()
    return growing.step


def differences(stored: Steps, steps: int, *, single: bool = False, mlflow: bool = False) -> list[str]:
    """Return how what is stored differs from the record, which should be empty.

    Args:
        single: the store has floats of 32 bits.
        mlflow: names are MLflow's.
    """
    wrong = [f"steps: {sorted(set(stored) ^ set(range(1, steps + 1)))}"] if [*stored] != [*range(1, steps + 1)] else []
    for step in sorted(stored):
        record = {name: value for name, value in record_of(step).items() if name != "step"}
        if mlflow:
            record = {name.replace("@", "_40"): value for name, value in record.items()}
        if stored[step].keys() != record.keys():
            wrong.append(f"step {step}: {sorted(stored[step].keys() ^ record.keys())}")
            continue
        for name, value in record.items():
            expected = math.nan if value is None else float(value)
            close = math.isclose(stored[step][name], expected, rel_tol=1e-6 if single else 0)
            if not close and not (math.isnan(expected) and math.isnan(stored[step][name])):
                wrong.append(f"step {step}: {name}={stored[step][name]}, not {expected}")
    return wrong


def in_tensorboard(directory: Path) -> Steps:
    """Every scalar event of every file. Fails if a step or a value of a step is there twice."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps: Steps = {}
    for file in sorted(directory.glob("events.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            values = {value.tag: value.simple_value for value in event.summary.value if value.HasField("simple_value")}
            if values:
                assert event.step not in steps, f"step {event.step} is there twice"
                steps[event.step] = values
    return steps


def mlflow_client(uri: str) -> Any:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # ``mirror`` does not pass it on
    return MlflowClient(uri)


def in_mlflow(uri: str, run_id: str) -> Steps:
    """The history of every metric of a run. Fails if a metric has two values for a step."""
    client = mlflow_client(uri)
    steps: Steps = {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            values = steps.setdefault(metric.step, {})
            assert name not in values, f"step {metric.step}: {name} is there twice"
            values[name] = metric.value
    return dict(sorted(steps.items()))


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run's file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # its process was killed
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield pb.Record.FromString(whole)


def in_wandb(run: Path) -> Steps:
    """The history in all offline files of a run. Fails if a step is there twice."""
    steps: Steps = {}
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.HasField("history"):
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                step = values["step"]
                assert step not in steps, f"step {step} is there twice"
                numbers = {n: v for n, v in values.items() if not n.startswith("_") and not isinstance(v, str)}
                steps[step] = {name: math.nan if value is None else value for name, value in numbers.items()}
    return steps
