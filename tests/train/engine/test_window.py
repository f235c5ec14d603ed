"""Passes of the loop's own before the first micro-batch of a window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "stray_gradients_worker.py"


@pytest.mark.parametrize(
    ("strategy", "sync"),
    [("single", "boundary"), ("ddp", "boundary"), ("ddp", "every"), ("fsdp", "boundary"), ("fsdp", "gather_once")],
)
def test_gradients_of_passes_before_the_first_micro_batch_are_discarded(
    strategy: str, sync: str, tmp_path: Path
) -> None:
    ranks = 1 if strategy == "single" else 2
    output = torchrun(WORKER, [f"strategy={strategy}", f"strategy.sync={sync}"], ranks, tmp_path)
    assert json.loads(output.splitlines()[-1])["error"] < 1e-6
