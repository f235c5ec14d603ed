"""Checkpoints, evaluation and record in a loop of the user's own; two engines in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_two_models_against_each_other_are_those_of_plain_torch(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "two_engines_worker.py", [str(tmp_path)], 2, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert "was saved with the further engines critic, and engine.resume was given none" in seen.pop("refused")
    assert len(seen) == 4
    for name, found in seen.items():
        assert found["error"] < 3 * found["at once"], (name, found)
        assert found["resumed alike"], name


def test_the_mistakes_of_a_loop_that_saves(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "run_engine_worker.py", [str(tmp_path)], 2, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert "engine.finish_step() needs engine.resume() before the first window" in seen["not resumed"]
    assert "extra must be JSON: Object of type Tensor" in seen["tensor"]
    assert "needs loss=function of (model, batch)" in seen["no loss"]
    assert "The ranks have different run directories" in seen["directories"]
    assert "run.name=NAME" in seen["directories"]
    assert "once, before the first step" in seen["twice"]
    assert seen["evaluated"] == pytest.approx(seen["expected"])
