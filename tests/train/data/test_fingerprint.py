"""A task must build the same on every rank and at every start; otherwise no step is taken."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.plan.task_inspection import describe_task
from launcher.task import load_task, train_data
from launcher.train.data.fingerprint import outline
from tests.helpers import inspection_of, torchrun
from tests.train.data import data_tasks
from tests.train.data.data_tasks import SAMPLES, TRAINED

WORKER = Path(__file__).parent / "data_worker.py"
COMMON = (
    "precision=fp32", "batch.global_size=16", "batch.micro_size=4", "train.epochs=1", "train.steps=null",
    "schedule=constant", "checkpoint.enabled=false", "run.calibrate_s=0", "cluster.workers_per_node=2",
)  # fmt: skip
SPLITS = ("Split", "Shuffled", "InTheConstructor", "OfAllKinds", "Augmented", "Loaded")
SEEDED = ("Split strategy=fsdp", "Split task.width=5 train.loader_workers=0", "Split precision=bf16 train.eval_every=1")
DIVIDED = "train.data_shards=4"
ALIKE = ("Streamed", "Sharded", f"StreamOfFiles {DIVIDED}", "TwinData", "Split train.seed=1")
ERRORS = {
    "OtherSplit": "DataError: train_data() differs between ranks: sample 0 on rank 1 is not sample 0 on rank 0.",
    "OtherHeldOut train.loader_workers=0": "DataError: eval_data() differs between ranks: sample 0 on rank 1",
    "OtherLabels": "DataError: train_data() differs between ranks: sample 1 on rank 1 is not sample 1 on rank 0.",
    "Longer": "DataError: train_data() differs between ranks: 72 samples on rank 0, 73 samples on rank 1.",
    "NotHeldOutEverywhere": "DataError: eval_data() differs between ranks: 8 samples on rank 0, no data (None) on rank",
    f"StreamOfUnsortedFiles {DIVIDED}": "DataError: The training data differs between ranks: sample 0 of the stream on",
    f"StreamOfFewerFiles {DIVIDED}": (
        "DataError: train_data() differs between ranks: a stream of 8 shards, divided into 4 on rank 0, a stream of 7"
    ),
    "OtherStream": "DataError: The training data differs between ranks: sample 0 of the stream on rank 1",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    cases = json.dumps([*SPLITS, *SEEDED, *ALIKE, *ERRORS])
    return torchrun(WORKER, [data_tasks.__name__, json.dumps(COMMON), cases], 2, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def seen(printed: str) -> dict[str, Any]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SPLITS, *SEEDED])
def test_every_sample_is_trained_on_once_and_none_is_held_out(seen: dict[str, Any], case: str) -> None:
    trained = [number for each in seen[case] for number in each["train"]]
    held_out = {number for each in seen[case] for number in each["eval"]}
    assert len(set(trained)) == TRAINED
    assert len(held_out) == SAMPLES - TRAINED
    assert not held_out & set(trained)


@pytest.mark.slow
def test_the_data_depends_on_the_seed_alone(seen: dict[str, Any]) -> None:
    """Neither on what the model draws, nor on the strategy, nor on where samples are read, nor on the start."""
    orders = {case: [each["train"] for each in seen[case]] for case in (*SEEDED, "Split", "Split train.seed=1")}
    assert all(orders[case] == orders["Split"] for case in SEEDED)
    assert orders["Split train.seed=1"] != orders["Split"]


@pytest.mark.slow
def test_held_out_data_is_built_once(seen: dict[str, Any]) -> None:
    each = seen["Split precision=bf16 train.eval_every=1"][0]
    assert each["built"] == ["train", "eval"]
    assert len([line for line in each["records"] if "eval/loss" in line]) == 5


@pytest.mark.slow
def test_streams(seen: dict[str, Any]) -> None:
    for case in ("Streamed", "Sharded", f"StreamOfFiles {DIVIDED}"):
        assert {number for each in seen[case] for number in each["train"]} == set(range(TRAINED))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "message"), ERRORS.items(), ids=ERRORS)
def test_a_difference_ends_the_job_on_every_rank(seen: dict[str, Any], case: str, message: str) -> None:
    errors = [each["error"] for each in seen[case]]
    assert errors[0] == errors[1]
    assert errors[0].startswith(message)


@pytest.mark.slow
def test_held_out_data_that_is_trained_on_is_pointed_out(printed: str) -> None:
    warnings = [line for line in printed.splitlines() if "begins with the samples of" in line]
    assert warnings == ["eval_data() begins with the samples of train_data(): it may not be held out."]


def test_the_plan_looks_at_the_data_of_the_run() -> None:
    """Its length is drawn at random."""
    target = "tests.train.data.data_tasks.OfSomeLength"
    planned = describe_task(inspection_of(target, "train.seed=2"))
    assert planned.samples == len(train_data(load_task(target, {}, [], 2), 2))


NAN, INF = float("nan"), float("inf")
RANDOM = torch.Generator().manual_seed(3)
FEATURES = torch.randn(16, generator=RANDOM)
IMAGE = torch.randn(3, 32, 32, generator=RANDOM)
PHOTO = torch.randint(10, 245, (3, 32, 32), generator=RANDOM, dtype=torch.uint8)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value, self.owner = value, self


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        ({"a": 1, "b": [2.0]}, {"a": 1, "b": [2.2]}),
        ("text", "texts"),
        (b"1", "1"),
        ({1, 2}, {1, 3}),
        ((1, None), (1, 0)),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
        ((IMAGE, 0.0), (IMAGE, 1.0)),
        ({"time": 1.7e9, "x": FEATURES}, {"time": 1.7e9, "x": FEATURES + 0.01}),
        ({"time": 1.70e9, "x": FEATURES}, {"time": 1.71e9, "x": FEATURES}),
        (torch.cat([torch.tensor([1.7e9]), FEATURES]), torch.cat([torch.tensor([1.7e9]), FEATURES + 0.01])),
        ((torch.full((16,), -1e4), FEATURES), (torch.full((16,), -1e4), FEATURES.flip(0))),
        (torch.tensor([1e6, 0.5]), torch.tensor([1e6 + 1, 0.5])),
        (torch.tensor([1e6, 0.5]), torch.tensor([1e6, 0.6])),
        (torch.eye(50_000, 1)[:, 0], torch.eye(50_000, 1)[:, 0].roll(1)),
        (torch.tensor([NAN, 1.0, 2.0]), torch.tensor([NAN, 1.0, 3.0])),
        (torch.tensor([NAN, 1.0, 0.0]), torch.tensor([0.0, 1.0, NAN])),
        (torch.tensor([INF, 1.0, 2.0]), torch.tensor([-INF, 1.0, 2.0])),
        ((0.5, NAN), (0.6, NAN)),
        ([0.5, 1.5, INF], [0.5, 1.6, INF]),
        ({0.5, 1.5}, {0.5, 1.6}),
        ("/data/a.wav", "/data/b.wav"),
        (Path("/data/a.wav"), Path("/data/b.wav")),
        (Plain(torch.tensor(1)), Plain(torch.tensor(2))),
        (Slotted(1.0), Slotted(2.0)),
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (torch.tensor(0, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8)),
        (torch.zeros(99, dtype=torch.uint8), torch.ones(99, dtype=torch.uint8)),
    ],
)
def test_outlines_differ_where_samples_do(one: Any, other: Any) -> None:
    assert outline(one).agrees(outline(one))
    assert not outline(one).agrees(outline(other))


MANY = {
    "kelvin": lambda: 285 + 8 * torch.randn(12, generator=RANDOM),
    "kelvin in bf16": lambda: (285 + 8 * torch.randn(12, generator=RANDOM)).bfloat16(),
    "long kelvin": lambda: 285 + 3 * torch.randn(1000, generator=RANDOM),
    "unix time": lambda: {"t": 1.7e9 + 3e7 * torch.rand(1).item(), "x": torch.rand(16, generator=RANDOM)},
    "mask": lambda: (torch.full((16,), -1e4), torch.randn(16, generator=RANDOM)),
    "mask in the features": lambda: torch.randn(16, generator=RANDOM).index_fill(0, torch.arange(12), -1e4),
    "image": lambda: torch.randn(3, 32, 32, generator=RANDOM),
    "bright photo": lambda: torch.randint(200, 255, (3, 32, 32), generator=RANDOM, dtype=torch.uint8),
}  # fmt: skip


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
def test_no_two_of_many_samples_agree(make: Callable[[], Any]) -> None:
    outlines = [outline(make()) for _ in range(100)]
    assert not [pair for pair in itertools.combinations(range(100), 2) if outlines[pair[0]].agrees(outlines[pair[1]])]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_rounded(entry) for entry in value)
    if isinstance(value, float):
        return value * (1 + 1e-7)
    return (value.double() * (1 + 1e-7 * torch.randn(value.shape, generator=RANDOM).clamp(-3, 3))).to(value.dtype)


@pytest.mark.parametrize("make", [
    *(make for name, make in MANY.items() if name != "bright photo"), lambda: torch.tensor([NAN, 1.0, INF, -INF]),
    lambda: {"y": 285.3, "list": [0.1, 250.0]}, lambda: torch.tensor([1e6, 0.5]),
])  # fmt: skip
def test_rounding_of_another_cpu_agrees(make: Callable[[], Any]) -> None:
    for _ in range(20):
        sample = make()
        assert outline(sample).agrees(outline(_rounded(sample)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PHOTO, PHOTO + torch.randint(0, 3, PHOTO.shape, generator=RANDOM, dtype=torch.uint8) - 1),
        ("/data/a.wav", "/scratch/17/a.wav"),
        (torch.tensor([NAN, 1.0]), torch.tensor([-NAN, 1.0])),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        (object(), object()),
    ],
)
def test_outlines_agree_where_only_the_host_differs(one: Any, other: Any) -> None:
    assert outline(one).agrees(outline(other))
