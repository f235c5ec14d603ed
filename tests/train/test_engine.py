"""The engine's gradient is that of one big batch: real ranks, items per sample uneven, short windows included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "engine_worker.py"
COMMON = ["precision=fp32", "train.epochs=2", "schedule.warmup_steps=4", "train.loader_workers=0", "run.calibrate=1"]


def run(ranks: int, samples: int, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return json.loads(torchrun(WORKER, [str(samples), *COMMON, *overrides], ranks, tmp_path).splitlines()[-1])


# 48 samples a window; 203 = 4 full windows and a short one of 11, which 4 ranks cannot share evenly
CASES = [
    (1, "batch.micro_size=48", "train.clip_norm=null"),
    (1, "batch.micro_size=6", "train.clip_norm=null"),
    (2, "batch.micro_size=8", "train.clip_norm=null"),
    (2, "batch.micro_size=3", "train.clip_norm=0.05"),
    (4, "batch.micro_size=4", "train.clip_norm=null"),
    (4, "batch.micro_size=2", "strategy.sync=every"),
]


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
def test_one_loss_curve_for_every_world(tmp_path: Path) -> None:
    curves = [
        run(ranks, 203, tmp_path, "batch.global_size=48", f"batch.micro_size={micro}")["losses"]
        for ranks, micro in ((1, 6), (2, 12), (4, 3))
    ]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.slow
def test_drop_leaves_the_short_window_out(tmp_path: Path) -> None:
    seen = run(2, 203, tmp_path, "batch.global_size=48", "batch.micro_size=8", "batch.short_window=drop")
    assert seen["samples"] == [48] * 8
