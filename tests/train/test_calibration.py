"""The calibration's turns, and what it makes of its times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.config import Sync
from launcher.train.calibration import Calibration, Kept, WindowTimes


def times(step_s: float, rehearsed_s: float | None = None) -> WindowTimes:
    return WindowTimes(step_s=step_s, work_s=0.9 * step_s, comm_s=0.5, rehearsed_s=rehearsed_s)


def test_it_takes_turns_and_compares_medians() -> None:
    calibration = Calibration(Sync.boundary, windows=3, alternates=True)
    own, every = Sync.boundary, Sync.every
    assert [calibration.sync(window) for window in range(12)] == [own, own, *[every, own] * 3, *[own] * 4]
    assert [window for window in range(12) if calibration.rehearses(window)] == [3, 5, 7]
    results = [
        calibration.observe(
            window,
            times(1.0 + window / 100, 0.7) if calibration.rehearses(window) else times(4.0 + window / 100),
            typical=True,
        )
        for window in range(12)
    ]
    assert [window for window, result in enumerate(results) if result] == [7]
    result = results[7]
    assert result is not None
    assert (result.step_s_every, result.step_s) == (4.04, 1.05)
    assert result.speedup == pytest.approx(4.04 / 1.05)
    assert result.exposed_s == pytest.approx(0.9 * 1.05 - 0.7)
    assert result.overlap == pytest.approx(1 - (0.9 * 1.05 - 0.7) / 0.5)


def test_without_an_alternative_only_rehearsals_are_made() -> None:
    calibration = Calibration(Sync.every, windows=2, alternates=False)
    assert [window for window in range(8) if calibration.rehearses(window)] == [2, 3]
    calibration.observe(2, times(1.0, 0.8), typical=True)
    result = calibration.observe(3, times(1.2, 0.8), typical=True)
    assert result is not None
    assert result.speedup is None
    assert result.step_s == pytest.approx(1.1)


def test_short_windows_do_not_count() -> None:
    calibration = Calibration(Sync.boundary, windows=2, alternates=True)
    for window in range(6):
        result = calibration.observe(window, times(1.0, 0.5 if calibration.rehearses(window) else None), typical=False)
    assert result is None
    assert calibration.result() is None


def test_none_asked_for() -> None:
    calibration = Calibration(Sync.boundary, windows=0, alternates=True)
    assert {calibration.sync(window) for window in range(20)} == {Sync.boundary}
    assert not any(map(calibration.rehearses, range(20)))


def test_random_state_and_buffers_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    kept = Kept(model, torch.device("cpu"))
    wanted = [buffer.clone() for buffer in model.buffers()]
    number = torch.rand(1)
    kept.put_back()
    model(torch.randn(8, 3))
    kept.put_back()
    assert torch.equal(torch.rand(1), number)
    assert all(map(torch.equal, model.buffers(), wanted))
