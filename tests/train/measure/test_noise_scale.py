"""The gradient noise scale of a problem where it is known, from the norms that each strategy leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.config.schema import Sync
from launcher.train.measure.noise_scale import FEWEST_WINDOWS, SMOOTHING, LocalGradNorm, Noise, NoiseScale
from launcher.train.measure.observer import EndedWindow
from tests.helpers import printed_by
from tests.train.measure.noise_worker import GLOBAL, SCALE, WIDTH, WINDOWS

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
        ("batch.micro_size=16 strategy.compress=powersgd powersgd.start=2", None),
    ],
    4: [
        ("batch.micro_size=4 strategy=hsdp strategy.shard_size=2 strategy.sync=boundary", True),
        ("batch.micro_size=4 strategy=hsdp strategy.shard_size=2 strategy.sync=replicas_at_boundary", False),
    ],
}


def run_all(ranks: int, cases: list[str], place: Path) -> list[dict[str, Any]]:
    lines = [case if "precision=" in case else f"{case} precision=fp32" for case in cases]
    return printed_by(Path(__file__).parent / "noise_worker.py", lines, ranks, place)


def deviations(small: float, ranks: int, scale: float) -> tuple[float, float]:
    """Return upper bounds of the standard deviations of the averages of tr(Sigma) and |G|^2, relative to them.

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


def ended(norm: float, samples: int, unit: float) -> EndedWindow:
    """A window in which items are samples."""
    return EndedWindow(samples, samples, True, norm, unit, step_s=1.0, data_s=0.0, wait_s=0.0)


def scale_of(windows: list[tuple[float, float]]) -> float:
    """Return the scale after ``windows`` without noise, each given by its |G|^2 and tr(Sigma)."""
    own, large, small = LocalGradNorm(), 64, 32
    scale = NoiseScale(2, torch.device("cpu"), own)
    for grad_sq, variance in windows:
        scale.before_backward(Sync.boundary, lambda: (small, small), first=True, last=True)
        own.take([torch.tensor([math.sqrt(grad_sq + variance / small)], dtype=torch.float64)])
        scale.window_ended(ended(math.sqrt(grad_sq + variance / large), large, unit=small))
        # the gradient lies there as a mean over `small` items; both ranks have the same
        scale.receive([2 * float(scale.own)])
    assert scale.estimate is not None
    assert scale.estimate.scale is not None
    return scale.estimate.scale


def test_the_large_gradients_of_a_run_s_beginning_do_not_drown_the_rest() -> None:
    """Ten windows with |G|^2 = 100 and a scale of 0.1, then fifty with |G|^2 = 0.1 and one of 100."""
    assert 50 < scale_of([(100.0, 10.0)] * 10 + [(0.1, 10.0)] * 50) < 150, "0.6 in plain averages"


def test_a_gradient_that_is_almost_zero_for_once_does_not_speak_for_all_that_follow() -> None:
    """One window has a scale of 500, among many with 50."""
    usual = [(1.0, 50.0)]
    assert 50 < scale_of(usual * 20 + [(1e-14, 0.0), (1.0, 500.0)] + usual * 300) < 100
    assert scale_of(usual * 20 + [(1e-310, 0.0)] + usual * 300) == pytest.approx(50, rel=0.02)


def simulated(scale: float, eigenvalues: Tensor, windows: int, ranks: int, seed: int) -> NoiseScale:
    """Return the noise scale after windows of 64 samples on ``ranks`` ranks, of a problem with |G|^2 = 1 and
    tr(Sigma) = ``scale``. ``eigenvalues``: those of the gradient's covariance, but for a factor; with few large ones
    the norms vary more."""
    generator, large, small = torch.Generator().manual_seed(seed), 64, 64 // ranks
    deviations = (eigenvalues / eigenvalues.sum() * scale / small).sqrt()
    draws = torch.randn(windows, ranks, len(eigenvalues), generator=generator, dtype=torch.float64)
    parts = len(eigenvalues) ** -0.5 + draws * deviations
    shares = parts.square().sum((1, 2)).tolist()
    norms = parts.mean(1).norm(dim=1).tolist()
    own = LocalGradNorm()
    noise = NoiseScale(ranks, torch.device("cpu"), own)
    for share, norm in zip(shares, norms, strict=True):
        noise.before_backward(Sync.boundary, lambda: (small, small), first=True, last=True)
        own.take([torch.zeros(1)])
        # a rank's gradient lies there as a mean over its samples, and items are samples
        noise.window_ended(ended(norm, large, unit=small))
        noise.receive([share / small])
    return noise


SPREAD, NARROW = torch.ones(256), 1 / torch.arange(1, 257)


@pytest.mark.parametrize("scale", [5000.0, 50.0])
@pytest.mark.parametrize("windows", [12, 100])
@pytest.mark.parametrize(("eigenvalues", "ranks"), [(SPREAD, 4), (NARROW, 2)], ids=["spread", "narrow"])
def test_the_interval_has_the_true_scale_in_it(scale: float, windows: int, eigenvalues: Tensor, ranks: int) -> None:
    """In 95% of 200 runs, give or take three standard deviations; and outside of it on either side alike."""
    found: list[Noise] = []
    for seed in range(200):
        noise = simulated(scale, eigenvalues, windows, ranks, seed).estimate
        assert noise is not None
        found.append(noise)
    inside = sum(noise.low <= scale <= noise.high for noise in found)
    assert 181 <= inside <= 199, inside
    assert sum(noise.low > scale for noise in found) <= 12, "too large a batch is not advised"
    points = [noise.scale for noise in found if noise.scale is not None]
    assert all(noise.low <= noise.scale <= noise.high for noise in found if noise.scale is not None)
    if scale == 50:
        assert len(points) == 200
        assert windows == 12 or all(noise.high / noise.low < 3 for noise in found), "narrow enough to say something"
    else:
        assert sum(math.isinf(noise.high) for noise in found) > 60, (
            "64 samples of 5,000 leave the gradient in the noise"
        )


def test_a_norm_whose_square_is_out_of_range() -> None:
    gradient = LocalGradNorm()
    gradient.due = True
    gradient.take([torch.tensor([1e200], dtype=torch.float64)])
    assert gradient.square(torch.device("cpu")) == math.inf


def test_the_interval_is_the_same_after_a_resume() -> None:
    whole, first = simulated(50.0, NARROW, 60, 2, 0), simulated(50.0, NARROW, 60, 2, 0)
    second = NoiseScale(2, torch.device("cpu"), LocalGradNorm())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.estimate == whole.estimate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        (1, (0, 2)),
        (2, (0, 2, 5, 7)),
        *(pytest.param(ranks, range(len(CASES[ranks])), marks=pytest.mark.nightly) for ranks in CASES),
    ],
)
def test_a_known_scale_is_found(ranks: int, numbers: Sequence[int], tmp_path: Path) -> None:
    cases = [CASES[ranks][number] for number in numbers]
    seen = run_all(ranks, [case for case, _ in cases], tmp_path)
    for (case, whole), found in zip(cases, seen, strict=True):
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
        low, high = noise["interval"]
        assert low < noise["scale"] < high < 2 * low, case
        assert low / 1.3 < scale < high * 1.3, f"{case}: one draw; the coverage is that of the test above"
        assert found["windows"] == WINDOWS - 1, f"{case}: the first has none before it; the short one is not among them"
        assert found["first"] == FEWEST_WINDOWS + 1, "a window late, with the next one's flags"
