"""A checkpoint holds all that training goes on from: loaded, it continues bit by bit as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_bit_by_bit(ranks: int, precision: str, tmp_path: Path) -> None:
    options = ["batch.global_size=16", "batch.micro_size=4", "train.steps=12", f"precision={precision}"]
    words = torchrun(WORKER, [str(tmp_path), *options], ranks, tmp_path).split()
    assert {*words[-2:]} == {"step_999999", "step_1000000"}, "the newest are those of the highest steps"
    assert words[-3] == "kept"
