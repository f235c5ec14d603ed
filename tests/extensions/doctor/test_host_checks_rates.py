"""Latency and bandwidth of the links: known ones are found again from noisy measurements."""

from __future__ import annotations

import dataclasses
import random

import pytest

from launcher.extensions.doctor.bandwidth import KINDS, Sample
from launcher.extensions.doctor.host_checks import Rate, fit_rate
from launcher.plan.sync_policy import Collective

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = KINDS
# ranks, hosts, groups: what two hosts of two workers measure
SHAPES = ((2, 1, 1), (2, 2, 2))


def measure(
    latency_s: float = 1e-4, bytes_per_s: float = 1e9, *, kind: Collective = ALL_REDUCE, gloo: bool = True,
    noise: float = 0.0, seed: int = 0, shape: tuple[int, int, int] = SHAPES[0],
) -> list[Sample]:  # fmt: skip
    """Return what workers measure on links with this latency and bandwidth."""
    draw, (ranks, hosts, groups) = random.Random(seed), shape
    samples: list[Sample] = []
    for size in (4**power * 1024 for power in range(8)):
        one = Sample(kind=kind, payload_bytes=size, ranks=ranks, hosts=hosts, groups=groups, seconds=0.0)
        steps, moved = one.work(gloo=gloo)
        exact = steps * latency_s + moved / bytes_per_s
        samples.append(dataclasses.replace(one, seconds=exact * (1 + draw.uniform(-noise, noise))))
    return samples


def found(samples: list[Sample], *, gloo: bool = True) -> Rate:
    rate = fit_rate(samples, gloo=gloo)
    assert rate is not None
    return rate


@pytest.mark.parametrize(
    ("kind", "ranks", "hosts", "groups", "gloo", "steps", "moved"),
    [
        # one host: 2(W-1) steps; each rank sends 2(W-1)/W of 4000 bytes
        (ALL_REDUCE, 4, 1, 1, True, 6, 6000),
        # two hosts of one rank, and one ring for each of two workers of a host
        (ALL_REDUCE, 2, 2, 1, True, 2, 4000),
        (ALL_REDUCE, 2, 2, 2, True, 2, 8000),
        # parts of 1000 bytes, each sent to the three others at once
        (ALL_GATHER, 4, 1, 1, True, 1, 3000),
        (REDUCE_SCATTER, 2, 2, 1, True, 1, 2000),
        (ALL_GATHER, 4, 1, 1, False, 3, 3000),
        (REDUCE_SCATTER, 4, 4, 1, False, 3, 3000),
    ],
)
def test_steps_and_bytes(
    kind: Collective, ranks: int, hosts: int, groups: int, gloo: bool, steps: int, moved: float
) -> None:
    one = Sample(kind=kind, payload_bytes=4000, ranks=ranks, hosts=hosts, groups=groups, seconds=0.0)
    assert one.work(gloo=gloo) == (steps, pytest.approx(moved))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gloo", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_known_rate_is_found(gloo: bool, seed: int, kind: Collective, shape: tuple[int, int, int]) -> None:
    rate = found(measure(kind=kind, gloo=gloo, noise=0.05, seed=seed, shape=shape), gloo=gloo)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.06)
    assert rate.latency_s == pytest.approx(1e-4, rel=0.25)
    assert max(rate.errors) <= 0.15


def test_a_time_in_which_the_machine_was_busy_counts_little() -> None:
    samples = measure(noise=0.02)
    samples[3] = dataclasses.replace(samples[3], seconds=20 * samples[3].seconds)
    samples[6] = dataclasses.replace(samples[6], seconds=20 * samples[6].seconds)
    assert found(samples).bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_small_payloads_on_a_busy_machine_leave_a_bandwidth() -> None:
    samples = [
        dataclasses.replace(sample, seconds=0.5) if sample.payload_bytes < 2**20 else sample for sample in measure()
    ]
    assert found(samples).bytes_per_s == pytest.approx(2e9, rel=0.2)


def test_what_was_not_measured_is_not_known() -> None:
    samples = measure()
    assert fit_rate(samples[:5], gloo=True) is None, "small payloads do not show the bandwidth"
    assert fit_rate(samples[5:], gloo=True) is None
    assert fit_rate([], gloo=True) is None
