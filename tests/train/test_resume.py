"""A run that was stopped and begun again, by other processes, is the run that was never stopped: bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.train.safeload import Reader
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "resume_worker.py"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

COMMON = ("batch.global_size=16", "precision=fp32", "train.steps=10", "checkpoint.every=3", "run.calibrate=2")
DDP = ("strategy.bucket_mb=0.002",)
PLAIN = {"norm": False}  # torch has no BatchNorm in bf16 on a CPU
STREAM = {"streams": True, "samples": 50}
POWERSGD = (*DDP, "strategy.compress=powersgd", "strategy.powersgd_start=3")
FP16 = (*DDP, "precision=fp16", "precision.init_scale=1e6", "precision.growth_interval=3")
CASES: dict[int, dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, ...]]]] = {
    2: {
        "ddp": ((*DDP, "batch.micro_size=2", "train.epochs=2", "train.steps=null"), {}, (1, 4)),
        "here": ((*DDP, "batch.micro_size=2", "train.loader_workers=0", "train.eval_every=3"), {}, (7,)),
        "fsdp": (("strategy=fsdp", "batch.micro_size=2", "precision=bf16"), PLAIN, (5,)),
        "powersgd": ((*POWERSGD, "batch.micro_size=4"), {}, (2, 3)),
        "fp16": ((*FP16, "batch.micro_size=4", "train.log_every=2"), {}, (8, 4)),
        "stream": (("batch.micro_size=4",), STREAM, (2, 3)),
        "stream here": (
            ("batch.micro_size=4", "train.epochs=3", "train.steps=null", "schedule=constant", "train.loader_workers=0"),
            STREAM,
            (4, 3),
        ),
    },
    4: {
        "ddp": ((*DDP, "batch.micro_size=2"), {}, (1, 3)),
        "fsdp": (("strategy=fsdp", "batch.micro_size=4"), {}, (4,)),
        "hsdp": (("strategy=hsdp", "strategy.shard_size=2", "batch.micro_size=1", "precision=bf16"), PLAIN, (3,)),
        "powersgd": ((*POWERSGD, "batch.micro_size=2"), {}, (4,)),
        "fp16": ((*FP16, "batch.micro_size=2"), {}, (9,)),
    },
}  # fmt: skip


def run(jobs: list[dict[str, Any]], ranks: int, place: Path) -> str:
    (place / "jobs").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    return torchrun(WORKER, [str(place / "jobs")], ranks, place, timeout=120)


def tensors(directory: Path) -> dict[str, Tensor]:
    entries = Reader(directory).read_metadata().state_dict_metadata.items()
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same job share: all but times and memory."""
    timed = ("time/", "throughput/", "memory/", "comm/time_s", "comm/step_s", "comm/speedup", "comm/exposed", "comm/ov")
    return {name: value for name, value in record.items() if not name.startswith(timed)}


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same(run: Path, undisturbed: Path, resumed: int) -> None:
    """Parameters, optimizer state, random state and every record."""
    ours, theirs = ([*sorted((path / "checkpoints").glob("step_*"))][-1] for path in (run, undisturbed))
    assert ours.name == theirs.name
    mine, wanted = tensors(ours), tensors(theirs)
    assert mine.keys() == wanted.keys()
    assert len([name for name in mine if name.startswith("optimizer.state")]) > 20
    assert not [name for name, tensor in mine.items() if not torch.equal(tensor, wanted[name])]
    states = [json.loads((path / "state.json").read_text())["engine"] for path in (ours, theirs)]
    for state in states:
        state["calibration"] = {kind: len(times) for kind, times in state["calibration"].items()}
    states[0]["calibration"] = states[1]["calibration"]  # those just after a start are left out
    assert states[0] == states[1]

    by_step = {record["step"]: timeless(record) for record in records(undisturbed)}
    seen = [timeless(record) for record in records(run)]
    assert [record["step"] for record in seen] == sorted({record["step"] for record in seen}), "each once, in order"
    assert {*by_step} <= {record["step"] for record in seen}
    for record in seen:  # a stop is recorded, even where its step would not have been
        assert record == by_step.get(record["step"], record)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (run, undisturbed)]
    assert [summary.pop("resumed") for summary in summaries] == [resumed, 0]
    assert [summary.pop("checkpoint") for summary in summaries] == [str(ours), str(theirs)]
    assert timeless(summaries[0]) == timeless(summaries[1])
    assert summaries[0]["verdict"] == "done"


@pytest.mark.parametrize("ranks", CASES)
def test_in_pieces_it_is_the_same_run(ranks: int, tmp_path: Path) -> None:
    jobs = {
        name: {"run": str(tmp_path / name), "overrides": [*COMMON, *overrides], "task": task}
        for name, (overrides, task, _) in CASES[ranks].items()
    }
    whole = [job | {"run": f"{job['run']} whole"} for job in jobs.values()]
    first = [jobs[name] | {"stop": stops[0]} for name, (_, _, stops) in CASES[ranks].items()]
    run([*whole, *first], ranks, tmp_path)
    # each further piece in a process that has seen nothing of the run
    second = [jobs[name] | {"stop": stops[1]} for name, (_, _, stops) in CASES[ranks].items() if len(stops) > 1]
    rest = [job for job in jobs.values() if job["run"] not in {piece["run"] for piece in second}]
    run([*second, *rest], ranks, tmp_path)
    if second:
        run([jobs[Path(piece["run"]).name] for piece in second], ranks, tmp_path)
    for name, (_, _, stops) in CASES[ranks].items():
        assert_same(tmp_path / name, tmp_path / f"{name} whole", resumed=len(stops))
