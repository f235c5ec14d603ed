"""A run that is killed again and again is in each tracker with each step once.

Real training, killed by SIGKILL at random moments: all of its processes, after which `launch resume` continues it; a
worker, after which its agent restarts it; and the tracker's process alone. Every resume cuts the record back to the
last checkpoint.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.files import Tail
from launcher.rundir.paths import RunPaths
from tests.helpers import CORPUS
from tests.infra.mirrored import Steps, in_mlflow, in_tensorboard, in_wandb
from tests.infra.mlflow_server import MlflowServer
from tests.infra.runs import timeless
from tests.system.deaths import Chaos

pytestmark = pytest.mark.slow

JOB = (
    CORPUS, "task.width=16", "task.depth=1", "task.heads=1", "task.seq_len=16", "task.eval_samples=32",
    "precision=fp32", "train.eval_every=50", "train.deterministic=true", "checkpoint.every=4", "checkpoint.keep=2",
    "cluster.device=cpu", "cluster.workers_per_node=1", "cluster.max_restarts=1000", "run.calibrate_s=0",
)  # fmt: skip
KINDS = ("a worker", "the mirror", "the tree")
Records = dict[int, list[dict[str, Any]]]


class Watch(threading.Thread):
    """Reader of what a run shows while it lasts.

    Attributes:
        records: by step, every record that metrics.jsonl ever had of it: a cut-back replaces the later ones.
    """

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(daemon=True)
        self.records: Records = {}
        self._tail, self._over = Tail(paths.metrics), threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self._read()

    def _read(self) -> None:
        for line in self._tail.lines():
            record = json.loads(line)
            versions = self.records.setdefault(record["step"], [])
            if record not in versions:
                versions.append(record)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._read()


def wrong_values(stored: dict[str, float], versions: list[dict[str, Any]], *, single: bool = False) -> list[str]:
    """Return the names whose values are not those of a record of this step; times may be those of any.

    Args:
        single: the store has floats of 32 bits.
    """

    def same(value: float, recorded: Any) -> bool:
        if recorded is None:
            return value is None or math.isnan(value)
        return math.isclose(value, recorded, rel_tol=1e-6 if single else 0)

    numbers = [
        {name: value for name, value in record.items() if value is None or isinstance(value, int | float)}
        for record in versions
    ]
    lasting = timeless(numbers[0]).keys() - {"step"}
    missing = lasting - stored.keys()
    return sorted(missing) + [
        f"{name}={value}"
        for name, value in stored.items()
        if not any(name in record and same(value, record[name]) for record in numbers)
    ]


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path) as server:
        yield server.start()


def kill_and_watch(directory: Path, *overrides: str, rounds: int) -> tuple[RunPaths, Watch]:
    """Train with ``2 * rounds`` kills of the run and ``rounds`` of the tracker's process."""
    chaos = Chaos(directory, len(KINDS) * rounds, random.Random(rounds), KINDS, last="the tree", job=(*JOB, *overrides))
    watch = Watch(chaos.paths)
    watch.start()
    try:
        chaos.run()
    finally:
        watch.stop()
    assert chaos.problems == []
    assert Counter(kind for kind, _, _ in chaos.done) == dict.fromkeys(KINDS, rounds)
    # a single kill may come right after a save
    assert rounds == 1 or sum(len(versions) > 1 for versions in watch.records.values()) > rounds, "no steps repeated"
    assert [*sorted(watch.records)] == [*range(1, chaos.steps + 1)]
    return chaos.paths, watch


ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(15, marks=pytest.mark.nightly)])


@ROUNDS
@pytest.mark.parametrize(
    "tracker", ["wandb", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tensorboard", "mlflow"))]
)
def test_each_step_is_there_once(tracker: str, rounds: int, tmp_path: Path) -> None:
    paths, watch = kill_and_watch(tmp_path, f"trackers=[{tracker}]", "wandb.mode=offline", rounds=rounds)
    status = json.loads(paths.tracker_status(tracker).read_text())
    stored = {
        "wandb": lambda: in_wandb(paths.root),
        "tensorboard": lambda: in_tensorboard(paths.root / "tensorboard"),
        "mlflow": lambda: in_mlflow(str(tmp_path / "runs" / "mlruns"), status["run_id"]),
    }[tracker]()
    require_each_step_once(stored, watch.records, single=tracker == "tensorboard")
    assert status["problem"] is None


@pytest.mark.nightly
def test_each_step_is_on_a_real_server_of_mlflow_once(mlflow_server: MlflowServer, tmp_path: Path) -> None:
    """Needs the package mlflow, with its server."""
    uri = mlflow_server.uri
    paths, watch = kill_and_watch(tmp_path, "trackers=[mlflow]", f"mlflow.tracking_uri={uri}", rounds=15)
    status = json.loads(paths.tracker_status("mlflow").read_text())
    require_each_step_once(in_mlflow(uri, status["run_id"]), watch.records)
    assert status["problem"] is None


def require_each_step_once(stored: Steps, records: Records, *, single: bool = False) -> None:
    """Check that ``stored`` has each step, in order, with the values recorded. Readers fail if one is there twice."""
    assert [*stored] == [*range(1, len(records) + 1)]
    wrong = {step: bad for step in stored if (bad := wrong_values(stored[step], records[step], single=single))}
    assert not wrong
