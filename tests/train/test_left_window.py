"""A loop that catches an exception inside a window and continues: nothing of that window stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_nothing_stays_of_a_window_that_the_loop_has_left(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "left_window_worker.py", [], 2, tmp_path).splitlines()
    seen, alone = (json.loads(line) for line in lines if line.startswith("{"))
    assert sum("was left early and is not applied" in line for line in lines) == 14
    assert "engine.step() was not called" in seen.pop("without step")
    assert len(seen) == 21
    for case, found in seen.items():
        assert found["error"] < max(1e-6, 2 * found["at best"]), (case, found)
        assert not found["autocast after"]
        if case.endswith("again"):  # the window that was left is run again: parameters, buffers and random numbers
            assert found["same"], case
            assert found["autocast"] == ["False"]
            assert found["windows"] == 4
        else:
            assert found["windows"] == 5
    assert "Rank 1 has left a window in micro-batch 1, and after 2 s 0 had not" in alone["one rank"]
