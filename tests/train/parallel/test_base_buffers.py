"""Buffers under every strategy: those that training changes are rank 0's at the start of each window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "buffers_worker.py"
STATISTICS = 8 * 4 + 8 * 4 + 8 + 4  # mean, variance, how many batches; and an average of the model's own


@pytest.mark.slow
def test_statistics_are_shared_and_constants_are_not_sent(tmp_path: Path) -> None:
    strategies = ["strategy=ddp", "strategy=ddp strategy.sync=every", "strategy=fsdp"]
    lines = torchrun(WORKER, strategies, 2, tmp_path).splitlines()
    seen = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(seen) == 3
    for result in seen:
        assert result["apart"] == [0.0] * 8
        assert result["sent"] == [0] + [STATISTICS] * 7, "the first window shows which buffers change"
        assert result["counted"] == result["seen"] == 16, "each batch is seen once"
