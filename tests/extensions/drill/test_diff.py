"""Two checkpoints side by side: every bit counts, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from launcher.extensions.drill.diff import diff_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(place: Path, **changed: Any) -> Path:
    model = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(float("nan")), "none": torch.empty(0)}
    optimizer = {"moment": torch.ones(4, dtype=torch.bfloat16), "lr": 0.25, "betas": [0.9, 0.95]}
    model |= changed.pop("model", {})
    dcp.save({"model": model, "optimizer": optimizer | changed}, checkpoint_id=place, no_dist=True)
    return place


def test_equal_checkpoints_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    found = diff_checkpoints(saved(tmp_path / "1"), saved(tmp_path / "2"))
    assert (found.tensors, found.differing, found.first, found.norm) == (6, 0, None, 0.0)


@pytest.mark.parametrize(
    ("changed", "first", "absolute"),
    [
        ({"model": {"a": torch.tensor([[0, 1, 2], [3, 4, 5.5]])}}, "model.a", 0.5),
        ({"model": {"a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])}}, "model.a", 0.0),
        ({"model": {"a": torch.zeros(3, 2)}}, "model.a", 0.0),
        ({"model": {"c": torch.zeros(1)}}, "model.c", 0.0),
        ({"moment": torch.full((4,), 1.5, dtype=torch.bfloat16)}, "optimizer.moment", 0.5),
        ({"moment": torch.full((4,), float("nan"), dtype=torch.bfloat16)}, "optimizer.moment", 1e100),
        ({"lr": 0.5}, "optimizer.lr", 0.0),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changed: dict[str, Any], first: str, absolute: float) -> None:
    found = diff_checkpoints(saved(tmp_path / "1", **changed), saved(tmp_path / "2"))
    assert (found.differing, found.first, found.absolute) == (1, first, absolute)
