"""A checkpoint holds all that training goes on from: loaded, it continues bit by bit as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "checkpoint_worker.py"


POWERSGD = "strategy.compress=powersgd strategy.powersgd_start=2 precision=fp32"
CASES = [
    (1, "precision=fp32"), (2, "precision=fp32"), (1, "precision=fp16"), (2, "precision=fp16"), (2, POWERSGD),
    (2, "strategy=fsdp precision=fp16"), (4, "strategy=hsdp strategy.shard_size=2 precision=bf16"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "extra"), CASES)
def test_training_goes_on_bit_by_bit(ranks: int, extra: str, tmp_path: Path) -> None:
    options = ["batch.global_size=16", "batch.micro_size=4", "train.steps=12", *extra.split()]
    words = torchrun(WORKER, [str(tmp_path), *options], ranks, tmp_path).split()
    assert {*words[-2:]} == {"step_999999", "step_1000000"}, "the newest are those of the highest steps"
    assert words[-3] == "kept"
