"""Ranks that call shard units in different orders, or not equally often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.parallel import unit_order
from launcher.train.parallel.unit_order import UnitOrder
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
    ],
)
def test_ranks_that_call_other_units_are_refused(case: str, sync: str, found: str, tmp_path: Path) -> None:
    out = torchrun(WORKER, [case, f"strategy.sync={sync}"], 2, tmp_path)
    assert out.count(f"told: TaskError: The ranks call different shard units: {found}") == 2, out
    assert out.count("find_unused_parameters=true") == 2, out


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[UnitOrder]]:
    """Two ranks in one process: the list holds the one that calls."""
    rank, store = [0], dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: rank[0])
    monkeypatch.setattr(unit_order, "_DEADLOCK_S", 0.0)
    monkeypatch.setattr(unit_order.time, "sleep", lambda _: None)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    monkeypatch.setattr(unit_order, "_counts", iter([0, 0]))
    orders = [UnitOrder(model, [model, *model], StrategyKind.fsdp, object()) for _ in range(2)]  # type: ignore[arg-type]
    return rank, orders


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_waited_and_then_computes_for_long_is_no_deadlock(
    goes_on: bool, pair: tuple[list[int], list[UnitOrder]]
) -> None:
    rank, orders = pair
    for order in orders:
        order.begin_window()
        order.called(1)
    rank[0] = 1
    orders[1].stalled(7)
    if goes_on:
        orders[1].stalled(None)
    rank[0] = 0
    orders[0].called(2)

    def wait() -> None:
        for _ in range(3):
            orders[0].stalled(8)

    if goes_on:
        wait()
    else:
        with pytest.raises(TaskError, match="call 2 of the window is 1 on rank 0, and no further one on rank 1"):
            wait()
