"""The gradient noise scale of a problem where it is known, from the norms that each strategy leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.train.noise import FEWEST_WINDOWS, SMOOTHING, NoiseScale, OwnGradient
from tests.helpers import torchrun
from tests.train.noise_worker import GLOBAL, SCALE, WIDTH, WINDOWS

MANY = "batch.micro_size=4"
# ranks: options, and whether the small batch is a rank's whole window, or its first micro-batch, or (None) there is
# nothing that compares: one rank with one micro-batch; PowerSGD's gradient, which is not the mean of the ranks'
CASES: dict[int, list[tuple[str, bool | None]]] = {
    1: [
        (MANY, False),
        ("strategy=single precision=fp16 batch.micro_size=16", False),
        ("batch.micro_size=32", None),
        ("batch.micro_size=32 strategy=fsdp", None),
    ],
    2: [
        ("batch.micro_size=8", True),
        (f"{MANY} strategy.sync=every", False),
        ("batch.micro_size=8 precision=fp16 strategy.compress=bf16 strategy.bucket_mb=0.0003", True),
        ("batch.micro_size=8 items", True),
        ("batch.micro_size=8 strategy=fsdp items", True),
        ("batch.micro_size=8 strategy=fsdp strategy.sync=every items", False),
        ("batch.micro_size=16 strategy=fsdp strategy.sync=boundary precision.reduce_dtype=bf16 precision=bf16", True),
        ("batch.micro_size=16 strategy.compress=powersgd strategy.powersgd_start=2", None),
    ],
    4: [
        ("batch.micro_size=4 strategy=hsdp strategy.shard_size=2 strategy.sync=boundary", True),
        ("batch.micro_size=4 strategy=hsdp strategy.shard_size=2 strategy.sync=replicas_at_boundary", False),
    ],
}


def run_all(ranks: int, cases: list[str], place: Path) -> list[dict[str, Any]]:
    lines = [case if "precision=" in case else f"{case} precision=fp32" for case in cases]
    out = torchrun(Path(__file__).parent / "noise_worker.py", lines, ranks, place)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def deviations(small: float, ranks: int, scale: float) -> tuple[float, float]:
    """Of the averages of tr(Sigma) and |G|^2, as parts of them, at most: standard deviations.

    The squared norm of a mean gradient over B samples is that of a Gaussian vector of WIDTH numbers, with mean square
    |G|^2 = 1 and variance v = scale / (WIDTH B) each: its own variance is 4 v + 2 WIDTH v^2. The small ones are a mean
    over ranks. How the small and the large one move together is left open: standard deviations add up. The average
    over T windows with smoothing s varies as one of (1 + s) / (1 - s) * (1 - s^T) / (1 + s^T) independent windows.
    """

    def of_norm(samples: float) -> float:
        v = scale / (WIDTH * samples)
        return 4 * v + 2 * WIDTH * v**2

    low, high = math.sqrt(of_norm(small) / ranks), math.sqrt(of_norm(GLOBAL))
    forgotten = SMOOTHING**WINDOWS
    windows = (1 + SMOOTHING) / (1 - SMOOTHING) * (1 - forgotten) / (1 + forgotten)
    variance = (low + high) / (1 / small - 1 / GLOBAL) / scale
    grad_sq = (GLOBAL * high + small * low) / (GLOBAL - small)
    return variance / math.sqrt(windows), grad_sq / math.sqrt(windows)


def scale_of(windows: list[tuple[float, float]]) -> float:
    """What is said after windows with such a |G|^2 and tr(Sigma), without any noise of their own."""
    scale, own, large, small = NoiseScale(2, torch.device("cpu")), OwnGradient(), 64, 32
    for grad_sq, variance in windows:
        own.await_part(due=True)
        scale.begin(small, small)
        own.take([torch.tensor([math.sqrt(grad_sq + variance / small)], dtype=torch.float64)])
        scale.measure(own, math.sqrt(grad_sq + variance / large), large, large, unit=small)
        # the gradient lies there as a mean over `small` items; both ranks have the same
        scale.settle(2 * float(scale.own))
    assert scale.now is not None
    assert scale.now.scale is not None
    return scale.now.scale


def test_the_large_gradients_of_a_run_s_beginning_do_not_drown_the_rest() -> None:
    """Ten windows with |G|^2 = 100 and a scale of 0.1, then fifty with |G|^2 = 0.1 and one of 100."""
    assert 50 < scale_of([(100.0, 10.0)] * 10 + [(0.1, 10.0)] * 50) < 150, "0.6 in plain averages"


def test_a_gradient_that_is_almost_zero_for_once_does_not_speak_for_all_that_follow() -> None:
    """Of a scale of 500 for one window, among many with one of 50."""
    usual = [(1.0, 50.0)]
    assert 50 < scale_of(usual * 20 + [(1e-14, 0.0), (1.0, 500.0)] + usual * 300) < 100
    assert scale_of(usual * 20 + [(1e-310, 0.0)] + usual * 300) == pytest.approx(50, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_a_known_scale_is_found(ranks: int, tmp_path: Path) -> None:
    seen = run_all(ranks, [case for case, _ in CASES[ranks]], tmp_path)
    for (case, whole), found in zip(CASES[ranks], seen, strict=True):
        collectives = (ranks > 1) + (found["shards"] > 1)  # the flags; sharded, the norm that clips
        assert found["work"] == [[collectives, 0]], f"{case}: no other collective, no other backward pass"
        if whole is None:
            assert found["noise"] is None, f"{case}: nothing is said"
            continue
        # in samples, of which one has `items` items: their gradients are so many independent draws
        scale, small = SCALE / found["items"], GLOBAL / ranks if whole else found["micro"]
        variance, grad_sq = deviations(small, ranks, scale)
        assert max(variance, grad_sq) < 0.06, "the problem is one that can be measured"
        noise = found["noise"]
        assert noise["variance"] == pytest.approx(scale, rel=4 * variance), case
        assert noise["grad_sq"] == pytest.approx(1, rel=4 * grad_sq), case
        assert noise["scale"] == noise["variance"] / noise["grad_sq"], "of the averages"
        assert found["windows"] == WINDOWS - 1, f"{case}: the first has none before it; the short one is not among them"
        assert found["first"] == FEWEST_WINDOWS + 1, "a window late, with the next one's flags"
