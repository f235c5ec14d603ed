"""Dozens of simulated sites, some of which are late: all end with one model."""

from __future__ import annotations

import argparse

import pytest

from jobs import outer_sites


@pytest.mark.parametrize(("late", "compress"), [(0.0, "none"), (0.3, "int8")])
def test_sites_end_with_one_model_that_has_learned(late: float, compress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in outer_sites.ALONE.items():
        monkeypatch.setenv(name, value)
    options = argparse.Namespace(steps=40, every=10, batch=960, compress=compress)
    row = outer_sites.run(24, late, options)
    sites, shown, _, averages, missed, loss, accuracy, _, _ = row.strip("| ").split(" | ")
    assert (sites, shown, averages) == ("24", f"{late:.0%}", "4")
    assert (int(missed) > 0) == (late > 0)
    assert float(loss) < 1.0
    assert float(accuracy.rstrip("%")) > 75
