"""Collectives in a loss are refused in a window of several micro-batches, where its gradient would be another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import torchrun

pytestmark = pytest.mark.slow
PLACE = "in loss_collectives_worker.py, line"
# by case: the collectives that the message names
REFUSED = {
    "torch.distributed.nn": f"(allgather {PLACE}",
    "functional": "(all_gather",
    "a Function of one's own": f"(allgather {PLACE}",
    "in the model": f"(allgather {PLACE}",
    "without gradient": f"(allgather {PLACE}",
    "a mean with gradient": f"(allreduce {PLACE}",
    "fsdp": f"(allgather {PLACE}",
}
ALLOWED = ("one micro-batch", "a count", "objects", "no collective", "batch.norm=sync", "another BatchNorm")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Messages of all cases by rank, of one start of two ranks."""
    worker = Path(__file__).parent / "loss_collectives_worker.py"
    out = torchrun(worker, [], 2, tmp_path_factory.mktemp("collectives"))
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def test_samples_of_other_ranks_are_refused_on_all_ranks(seen: dict[str, Any]) -> None:
    assert set(seen) == {*REFUSED, *ALLOWED}
    for case, text in REFUSED.items():
        first, second = seen[case]
        assert first == second
        assert first.startswith("CollectiveInLoss: The loss of a micro-batch depends on what other ranks have")
        assert text in first, (case, first)
        assert "a window has 2 micro-batches" in first


def test_whatever_is_exact_or_only_logged_is_allowed(seen: dict[str, Any]) -> None:
    assert {case: seen[case] for case in ALLOWED} == {case: ["", ""] for case in ALLOWED}
