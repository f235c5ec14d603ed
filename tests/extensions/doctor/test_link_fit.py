"""Fit of the links: a known model is found again from noisy measurements of it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from launcher.extensions.doctor.link_fit import LARGE_BYTES, Level, Links, Rate, Sample, fit_levels
from launcher.plan.sync_policy import Collective

KINDS = (Collective.all_reduce, Collective.all_gather, Collective.reduce_scatter)
# ranks, hosts, groups: what two hosts of two workers measure
SHAPES = ((2, 1, 1), (2, 2, 2), (4, 2, 1))
OWN = (
    Rate(kind=Collective.all_gather, latency_s=3e-4, bytes_per_s=6e8),
    Rate(kind=Collective.reduce_scatter, latency_s=4e-4, bytes_per_s=5e8),
)
MODEL = Links(
    inside=Level(latency_s=1e-4, bytes_per_s=1e9, error=0.0, own=OWN),
    between=Level(latency_s=5e-4, bytes_per_s=1.2e8, error=0.0),
    gloo=True,
)  # fmt: skip


def measure(
    links: Links, noise: float = 0.0, seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[Sample]:
    draw = random.Random(seed)
    samples: list[Sample] = []
    for ranks, hosts, groups in shapes:
        for kind in KINDS:
            for size in (4**power * 1024 for power in range(8)):
                exact = links.seconds(kind, size, ranks=ranks, hosts=hosts, groups=groups)
                seconds = exact * (1 + draw.uniform(-noise, noise))
                samples.append(
                    Sample(kind=kind, payload_bytes=size, ranks=ranks, hosts=hosts, groups=groups, seconds=seconds)
                )
    return samples


@pytest.mark.parametrize("gloo", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_known_model_is_found(gloo: bool, seed: int) -> None:
    model = dataclasses.replace(MODEL, gloo=gloo)
    inside, between = fit_levels(measure(model, 0.05, seed), gloo=gloo)
    assert inside is not None
    assert between is not None
    assert model.between is not None
    for found, level in ((inside, model.inside), (between, model.between)):
        for kind in KINDS:
            rate, true = found.for_kind(kind), level.for_kind(kind)
            assert rate.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.06)
            assert rate.latency_s == pytest.approx(true.latency_s, rel=0.25)
        assert 0.03 <= found.error <= 0.15


def test_exact_measurements_are_fitted_exactly() -> None:
    inside, between = fit_levels(measure(MODEL), gloo=True)
    assert inside is not None
    assert between is not None
    assert inside.latency_s == pytest.approx(1e-4)
    assert inside.bytes_per_s == pytest.approx(1e9)
    assert {rate.kind: rate.bytes_per_s for rate in inside.own} == pytest.approx(
        {rate.kind: rate.bytes_per_s for rate in OWN}
    )
    assert between.bytes_per_s == pytest.approx(1.2e8)
    assert inside.error == between.error == 0.03, "no model is taken to be better than this"


def test_a_time_in_which_the_machine_was_busy_counts_little() -> None:
    samples = measure(MODEL, 0.02)
    for number in (3, 27, 51):
        samples[number] = dataclasses.replace(samples[number], seconds=20 * samples[number].seconds)
    inside, between = fit_levels(samples, gloo=True)
    assert inside is not None
    assert between is not None
    assert inside.bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert between.bytes_per_s == pytest.approx(1.2e8, rel=0.1)


def test_small_payloads_on_a_busy_machine_leave_a_bandwidth() -> None:
    samples = [
        dataclasses.replace(sample, seconds=0.5) if sample.payload_bytes < LARGE_BYTES else sample
        for sample in measure(MODEL)
    ]
    inside, _ = fit_levels(samples, gloo=True)
    assert inside is not None
    assert inside.bytes_per_s == pytest.approx(2e9, rel=0.2)


def test_the_error_is_that_of_the_large_collectives() -> None:
    """Times of groups of all ranks that the two levels do not explain make the error larger."""
    samples = [
        dataclasses.replace(sample, seconds=1.5 * sample.seconds) if sample.ranks == 4 else sample
        for sample in measure(MODEL)
    ]
    _, between = fit_levels(samples, gloo=True)
    assert between is not None
    assert between.error == pytest.approx(0.5, abs=0.02)


def test_what_was_not_measured_is_not_known() -> None:
    one_host = measure(MODEL, shapes=SHAPES[:1])
    assert fit_levels(one_host, gloo=True)[1] is None
    assert fit_levels(measure(MODEL, shapes=((2, 2, 1),)), gloo=True)[0] is None
    small = [sample for sample in one_host if sample.payload_bytes < LARGE_BYTES]
    assert fit_levels(small, gloo=True) == (None, None), "small payloads do not show the bandwidth"
    assert fit_levels([], gloo=True) == (None, None)
    gathers = [sample for sample in one_host if sample.kind is not Collective.reduce_scatter]
    inside, _ = fit_levels(gathers, gloo=True)
    assert inside is not None
    assert inside.for_kind(Collective.reduce_scatter).bytes_per_s == inside.bytes_per_s
