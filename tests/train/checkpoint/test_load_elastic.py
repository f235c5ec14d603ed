"""A checkpoint of some ranks goes on at others, and under another strategy: the run learns what it would have learned.
One that is not of this run is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.infra.checkpoints import tensors
from tests.infra.runs import records
from tests.train.checkpoint.elastic_chain import STEPS, Chain, go, job, run, seen, strategies, worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

# `python -m tests.train.checkpoint.elastic_chain 8 4 6 1` is the same with more ranks
WORLDS = (4, 2, 3, 1)
# own shards on 4, 2 and 1 ranks; 3 ranks read all of them
STREAM = ("strategy=ddp", "batch.micro_size=2", "train.data_shards=4")
POWERSGD = ("strategy=ddp", "batch.micro_size=2", "strategy.compress=powersgd", "powersgd.start=2")
# what a run at two ranks is asked to go on with, from a checkpoint of step 5 at four: (forced, overrides, task, says)
WRONG: dict[str, tuple[list[str], list[str], dict[str, Any], list[str]]] = {
    "seed": ([], ["train.seed=3"], {}, ["train.seed=3 (was 0): the order of the samples"]),
    "seed, forced": (["train.seed"], ["train.seed=3"], {}, ["train.seed=3 (was 0)"]),
    "several": (
        [], ["batch.global_size=32", "optimizer=sgd", "batch.short_window=drop"], {"width": 24},
        [
            "batch.global_size=32 (was 16): the 5 windows so far had other sizes",
            "task.width=24 (was null)", "optimizer.kind=sgd (was adamw)", "batch.short_window=drop (was exact)",
        ],
    ),
    "samples": (["task.samples"], [], {"samples": 80}, ["task: samples=80 (was 90): the position in the data"]),
    "shape": (
        ["task.width"], [], {"width": 24},
        [
            "layers.0.weight has the shape [20, 12] there, and [24, 12] in the model",
            "layers.1.weight has the shape [12, 20] there, and [12, 24] in the model", "was saved from another model",
        ],
    ),
    "extra": (["task.extra"], [], {"extra": True}, ["extra.weight is not among them", "extra.bias is not among them"]),
}  # fmt: skip


def test_a_run_goes_on_in_any_world_and_strategy(tmp_path: Path) -> None:
    chains = [strategies(WORLDS, turn) for turn in (0, 5)]  # every strategy, and most ways from one to another
    streams = {"streams": True}
    stream = Chain("stream", tuple((ranks, STREAM if ranks > 1 else STREAM[1:]) for ranks in WORLDS), streams)
    kept = tmp_path / "powersgd" / "checkpoints" / "step_000006"
    memories = {ranks: tmp_path / f"memory{ranks}" for ranks in WORLDS[1:]}

    def whole() -> list[dict[str, Any]]:
        return [
            job(tmp_path / "whole", "strategy=ddp", "batch.micro_size=2"),
            job(tmp_path / "powersgd", *POWERSGD, stop=6),
        ]

    def reading(ranks: int) -> list[dict[str, Any]]:
        overrides = POWERSGD if ranks > 1 else ("strategy=single", "batch.micro_size=2")
        other = ["powersgd.rank=2"] if ranks == 3 else []
        return [job(memories[ranks], *overrides, *other, reads=str(kept))]

    def alone() -> list[dict[str, Any]]:
        return [*reading(1), job(tmp_path / "alone", "batch.micro_size=16", "train.data_shards=4", task=streams)]

    said = go([*chains, stream], tmp_path, {0: whole, 1: lambda: reading(2), 2: lambda: reading(3), 3: alone})
    assert seen(tmp_path / "stream") == seen(tmp_path / "alone"), "the same samples in each window"
    assert worst(tmp_path / "stream", tmp_path / "alone") < 3e-6
    assert not any("are read again" in text or "is read again" in text for text in said)
    for chain in chains:
        assert seen(tmp_path / chain.name) == seen(tmp_path / "whole"), "the same samples in each window"
        assert worst(tmp_path / chain.name, tmp_path / "whole") < 3e-6
        saves = sorted(int(path.name[-6:]) for path in (tmp_path / chain.name / "checkpoints").glob("step_*"))
        assert saves == [5, 6, 10, 12, 15, 18, 20], "at each stop, at the end of each epoch, and at the end"
        summary = json.loads((tmp_path / chain.name / "summary.json").read_text())
        assert [(each["step"], each["to"]["world_size"]) for each in summary["worlds"]] == [(5, 2), (10, 3), (15, 1)]
        assert summary["comm/wire_bytes"] == 0, "of the last world alone"
        lines = (tmp_path / chain.name / "metrics.jsonl").read_text().splitlines()
        since = [json.loads(line).get("progress/measured_since", 0) for line in lines]
        assert sorted({*since}) == [0, 5, 10, 15]
        assert "comm/step_s" not in summary
    assert "5 steps done, at 2 ranks instead of 4, with strategy=fsdp instead of ddp: accumulation 4" in said[1]
    assert "micro-batch 2; global batch 16 as before." in said[1]

    stored = tensors(kept)
    sums = {
        name.removeprefix("strategy_rank0.residue."): sum(stored[name.replace("rank0", f"rank{n}")] for n in range(4))
        for name in stored
        if name.startswith("strategy_rank0.residue.")
    }
    assert sum(torch.count_nonzero(residue) for residue in sums.values()) > 100
    randoms = {}
    for text, ranks in zip(said[1:], WORLDS[1:], strict=True):
        read = json.loads(next(line for line in text.splitlines() if line.startswith('{"ranks"')))
        assert read["ranks"] == 4
        randoms[ranks] = read["random"]
        assert len({str(each) for each in read["random"]}) == ranks
    assert randoms[2] == randoms[3][:2], "a rank whose number was there has its own random numbers"
    for ranks in (2, 3):
        for rank in range(ranks):
            memory = torch.load(memories[ranks] / f"memory.{rank}")
            assert memory["sums"].keys() == sums.keys()
            for name, residue in memory["sums"].items():
                torch.testing.assert_close(residue, sums[name], rtol=1e-5, atol=1e-7)
            for name, factor in memory["factors"].items():
                assert torch.equal(factor, stored[f"strategy_rank3.factors.{name}"])
            # those of rank 1 are of no use to rank 2, but the residue is
            assert bool(memory["factors"]) == (ranks == 2)
    assert "The residue of strategy.compress, the part of earlier gradients that it had not sent yet" in said[3]


def test_what_is_not_of_this_run_is_refused(tmp_path: Path) -> None:
    base = ("strategy=ddp", "batch.micro_size=4")
    run([job(tmp_path / "old", *base, stop=5)], 4, tmp_path)
    jobs: list[dict[str, Any]] = []
    for name, (forced, overrides, task, _) in WRONG.items():
        shutil.copytree(tmp_path / "old", tmp_path / name)
        given = job(tmp_path / name, *base, *overrides, forced=forced, task=task, raises="WrongCheckpoint")
        jobs.append(given)
    newer = tmp_path / "newer"
    shutil.copytree(tmp_path / "old", newer)
    manifest = newer / "checkpoints" / "step_000005" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 7}))
    jobs.append(job(newer, *base, raises="WrongCheckpoint"))
    # with another global batch from window 5 on, where the user insists
    bigger = tmp_path / "bigger"
    shutil.copytree(tmp_path / "old", bigger)
    (bigger / "checkpoints" / "step_000009 of mine").mkdir()
    jobs.append(job(bigger, *base, "batch.global_size=24", past=[[5, 16]], raises="WrongCheckpoint"))
    insisting = {"past": [[5, 16]], "forced": ["batch.global_size", "optimizer.lr"]}
    jobs.append(job(bigger, *base, "batch.global_size=24", "optimizer.lr=0.02", **insisting))
    # what lr_scaling=sqrt makes of 24 samples, k = 24/16; and without it
    scaled = ["optimizer.lr=0.01", "batch.global_size=24", "optimizer.lr_scaling=sqrt", "optimizer.reference_batch=16"]
    forced = ["batch.global_size", "optimizer.lr_scaling", "optimizer.reference_batch"]
    reads = str(tmp_path / "old" / "checkpoints" / "step_000005")
    jobs.append(job(tmp_path / "scaled", *base, *scaled, reads=reads, past=[[5, 16]], forced=forced))
    jobs.append(job(tmp_path / "kept", *base, reads=reads))
    said = run(jobs, 2, tmp_path)
    rescaled, kept = [json.loads(line) for line in said.splitlines() if line.startswith('{"ranks"')]
    assert rescaled["base_lr"] == pytest.approx(0.01 * math.sqrt(1.5))
    assert rescaled["betas"] == pytest.approx([0.85, 0.925])
    assert rescaled["eps"] == pytest.approx(1e-8 / math.sqrt(1.5))
    assert (kept["betas"], kept["eps"]) == ([0.9, 0.95], 1e-8)
    for name, (_, _, _, words) in WRONG.items():
        (told,) = [
            part for part in said.split("WrongCheckpoint on rank 0 of ") if part.startswith(f"{tmp_path / name}:")
        ]
        assert all(word in told for word in words), told
        assert sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) == ["latest", "step_000005"]
        assert len(records(tmp_path / name)) == 5, "nothing was written"
    assert "has format 7, and this launcher" in said
    assert f"WrongCheckpoint on rank 0 of {bigger}" in said
    assert "batch.global_size=24 (was 16): it defines what a step" in said
    windows = seen(bigger)
    assert [len(windows[index]) for index in range(12)] == [16] * 5 + [10, 24, 24, 24, 18, 24, 24]
    for epoch in (range(6), range(6, 10)):
        assert sorted(sample for index in epoch for sample in windows[index]) == list(range(90)), "each once"
    rates = {record["step"]: record["train/lr"] for record in records(bigger)}
    before = {record["step"]: record["train/lr"] for record in records(tmp_path / "old")}
    assert len(rates) == STEPS
    assert all(rates[step] == before[step] for step in before)
    assert rates[6] > 1.5 * before[5]
