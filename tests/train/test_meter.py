"""The meter's arithmetic, its refusal of what it did not see, and the calibration's turns."""

from __future__ import annotations

import pytest

from launcher.config import Sync
from launcher.errors import PolicyNotObserved
from launcher.plan import wire_factor
from launcher.train.meter import Calibration, Meter


@pytest.mark.parametrize(("world", "factor"), [(1, 0), (2, 1), (4, 1.5), (1024, 2 * 1023 / 1024)])
def test_wire_factor_of_a_ring(world: int, factor: float) -> None:
    assert wire_factor(world) == factor


def test_a_window_at_the_boundary_and_one_that_synchronises_each_micro_batch() -> None:
    meter = Meter(gradient_bytes=1000, world_size=4)
    meter.count(600)
    meter.count(400)
    stats = meter.close_window(8, Sync.boundary)
    assert (stats.collectives, stats.payload_bytes, stats.wire_bytes, stats.wire_bytes_every) == (2, 1000, 1500, 12000)
    assert stats.saved_fraction == 7 / 8
    for _ in range(8):
        meter.count(1000)
    stats = meter.close_window(8, Sync.every)
    assert (stats.collectives, stats.payload_bytes, stats.saved_fraction) == (8, 8000, 0)


@pytest.mark.parametrize(("seen", "sync"), [(0, Sync.boundary), (2, Sync.boundary), (1, Sync.every), (9, Sync.every)])
def test_a_policy_that_is_not_observed_is_an_error(seen: int, sync: Sync) -> None:
    meter = Meter(gradient_bytes=1000, world_size=2)
    for _ in range(seen):
        meter.count(1000)
    with pytest.raises(PolicyNotObserved, match=f"the communication hook saw {seen * 1000:,} in {seen} collectives"):
        meter.close_window(8, sync)


def test_one_rank_sends_nothing() -> None:
    stats = Meter(gradient_bytes=1000, world_size=1).close_window(8, Sync.boundary)
    assert (stats.payload_bytes, stats.wire_bytes_every, stats.saved_fraction) == (0, 0, 0)


def test_calibration_takes_turns_and_compares_medians() -> None:
    calibration = Calibration(Sync.boundary, windows=3)
    seen = [calibration.sync(step) for step in range(12)]
    own, every = Sync.boundary, Sync.every
    assert seen == [own, own, every, own, every, own, every, own, own, own, own, own]
    results = [
        calibration.observe(step, sync, {own: 1.0, every: 4.0}[sync] + step / 100, full=True)
        for step, sync in enumerate(seen)
    ]
    assert [step for step, result in enumerate(results) if result] == [7]
    result = results[7]
    assert result is not None
    assert (result.step_s_every, result.step_s) == (4.04, 1.05)
    assert result.speedup == pytest.approx(4.04 / 1.05)


def test_short_windows_do_not_count_for_the_calibration() -> None:
    calibration = Calibration(Sync.boundary, windows=2)
    for step in range(6):
        result = calibration.observe(step, calibration.sync(step), 1.0, full=False)
    assert result is None
    assert calibration.result() is None


def test_no_calibration() -> None:
    calibration = Calibration(Sync.boundary, windows=0)
    assert {calibration.sync(step) for step in range(20)} == {Sync.boundary}
