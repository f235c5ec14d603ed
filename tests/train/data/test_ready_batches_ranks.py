"""A loop with its own DataLoader on several ranks, resumed in the middle of an epoch, takes a plain loop's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "ready_batches_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_steps_are_those_of_a_plain_loop(ranks: int, tmp_path: Path) -> None:
    printed = torchrun(WORKER, [str(tmp_path), "ddp", "fsdp"], ranks, tmp_path)
    results = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert "differs between ranks: sample 0 of the stream on rank 1" in results.pop("other seeds")
    assert len(results) == 4
    assert max(results.values()) < 1e-5, results
