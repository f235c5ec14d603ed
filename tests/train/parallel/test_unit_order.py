"""Ranks that call shard units in different orders, or not equally often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "unit_order_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sync", "found"),
    [
        # all parameters are there for the whole window: found by the window's all-reduce
        ("order", "gather_once", "call 1 of the window is towers.0 on rank 0, and towers.1 on rank 1."),
        # the ranks wait for each other's part of the other tower
        ("order", "boundary", "call 1 of the window is towers.0 on rank 0, and towers.1 on rank 1."),
        ("skipped", "boundary", "call 2 of the window is no further one on rank 0, and towers.1 on rank 1."),
        ("same", "boundary", ""),
    ],
)
def test_ranks_that_call_other_units_are_refused(case: str, sync: str, found: str, tmp_path: Path) -> None:
    out = torchrun(WORKER, [case, f"strategy.sync={sync}"], 2, tmp_path)
    if not found:
        assert out.count("told: nothing") == 2, out
        return
    assert out.count(f"told: TaskError: The ranks call different shard units: {found}") == 2, out
    assert out.count("find_unused_parameters=true") == 2, out
