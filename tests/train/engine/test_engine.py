"""The engine's gradient is that of one big batch: real ranks, items per sample uneven, short windows included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "engine_worker.py"
COMMON = ["precision=fp32", "train.epochs=2", "schedule.warmup_steps=4", "train.loader_workers=0", "run.calibrate_s=0"]


def run_all(ranks: int, samples: int, tmp_path: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Several runs, one after the other, on the same ranks."""
    words = [word for overrides in runs for word in (*COMMON, *overrides, "/")]
    lines = torchrun(WORKER, [str(samples), *words], ranks, tmp_path).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def run(ranks: int, samples: int, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return run_all(ranks, samples, tmp_path, [list(overrides)])[0]


# 48 samples a window; 203 = 4 full windows and a short one of 11. All shapes and policies: tests/equivalence
CASES = [(1, "batch.micro_size=6", "train.clip_norm=null"), (2, "batch.micro_size=3", "train.clip_norm=0.05")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro", "extra"), CASES)
def test_gradient_of_one_big_batch(ranks: int, micro: str, extra: str, tmp_path: Path) -> None:
    clip = [] if "clip_norm" in extra else ["train.clip_norm=null"]
    seen = run(ranks, 203, tmp_path, "batch.global_size=48", micro, extra, *clip)
    assert seen["samples"] == [48, 48, 48, 48, 11] * 2, "each epoch is four full windows and the short one"
    assert seen["gradient"] < 1e-6
    assert seen["norm"] < 1e-6
    assert seen["parameters"] < 1e-5
    assert seen["clipped"] == (10 if "0.05" in extra else 0)


@pytest.mark.slow
def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """A short window of 2 samples on 4 ranks: two ranks run with weight zero."""
    seen = run(4, 50, tmp_path, "batch.global_size=48", "batch.micro_size=4", "train.clip_norm=null")
    assert seen["samples"] == [48, 2] * 2
    assert seen["gradient"] < 1e-6


@pytest.mark.slow
def test_drop_leaves_the_short_window_out(tmp_path: Path) -> None:
    seen = run(2, 203, tmp_path, "batch.global_size=48", "batch.micro_size=8", "batch.short_window=drop")
    assert seen["samples"] == [48] * 8


SHARDED = [("fsdp", sync) for sync in ("every", "boundary", "gather_once")] + [
    ("hsdp", sync) for sync in ("every", "boundary", "gather_once", "replicas_at_boundary")
]


def collectives(kind: str, sync: str, micro_batches: int) -> dict[str, int]:
    """Return the collectives of two shard units and the root, which stays gathered until the backward pass."""
    gathers = 3 if sync == "gather_once" else 5 * micro_batches
    scatters = 3 * micro_batches if sync in ("every", "replicas_at_boundary") else 3
    reduces = 3 * micro_batches if sync == "every" else 3
    wanted = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}
    return wanted if kind == "hsdp" else {name: wanted[name] for name in ("all_gather", "reduce_scatter")}


@pytest.mark.slow
def test_every_policy_of_every_sharding_is_one_big_batch(tmp_path: Path) -> None:
    """Gradients, parameters, one loss curve, and just the collectives of the policy table."""
    ranks = 4
    base = ["batch.global_size=48", "batch.micro_size=4"]
    runs = [
        [*base, f"strategy={kind}", f"strategy.sync={sync}", *(["strategy.shard_size=2"] if kind == "hsdp" else [])]
        for kind, sync in SHARDED
    ]
    clipped = [*base, "strategy=fsdp", "train.clip_norm=0.05"]
    *seen, with_clip = run_all(
        ranks, 203, tmp_path, [[*overrides, "train.clip_norm=null"] for overrides in runs] + [clipped]
    )
    for (kind, sync), result in zip(SHARDED, seen, strict=True):
        assert result["gradient"] < 1e-6, (kind, sync)
        assert result["norm"] < 1e-6, (kind, sync)
        assert result["parameters"] < 1e-5, (kind, sync)
        assert result["samples"] == [48, 48, 48, 48, 11] * 2
        assert result["losses"] == pytest.approx(seen[0]["losses"], rel=1e-5), (kind, sync)
        assert result["kinds"] == collectives(kind, sync, 12 // ranks), (kind, sync)
    assert with_clip["gradient"] < 1e-6
    assert with_clip["clipped"] == 10


@pytest.mark.slow
def test_compressed_gradients_keep_to_their_bound(tmp_path: Path) -> None:
    """bf16 rounds each number once when it is sent and once in the sum of two; PowerSGD loses nothing for good:
    the sum of what was applied, with the residue still kept back, is the sum of the gradients."""
    base = ["batch.global_size=48", "batch.micro_size=4", "train.clip_norm=null"]
    runs = [
        [*base, "strategy.compress=bf16"],
        [*base, "strategy.compress=powersgd", "strategy.powersgd_start=2", "strategy.bucket_mb=0.005"],
        [*base, "strategy.compress=bf16", "strategy.sync=every"],
    ]
    bf16, powersgd, every = run_all(2, 203, tmp_path, runs)
    assert 1e-4 < bf16["gradient"] < 2**-7
    assert every["gradient"] < 2**-7
    assert powersgd["gradient"] > 0.1, "rank 1 leaves much out of a single step"
    assert powersgd["owed"] < 1e-6
