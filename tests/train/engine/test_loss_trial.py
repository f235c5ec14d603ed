"""A total that is a mean, or has a part that is no sum, is refused before the first step; other losses are not, and
train as without a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.train.engine.loss_trial import NotDivisible, taken
from tests.helpers import series, torchrun

WORKER = Path(__file__).parent / "loss_trial_worker.py"
MEAN, PART = "is a mean over the micro-batch, and must be a sum", "is no sum over the micro-batch's items"


@pytest.mark.slow
@series(26, 48)
def test_only_losses_that_are_no_sums_are_refused(part: str, cases: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, [part], 2, tmp_path).splitlines()[-1])
    assert len(seen) == cases
    refused = {"a_mean": MEAN, "a_mean_as_a_term": MEAN, "penalised": PART, "with_a_mean": PART,
               "small_norm": PART, "with_a_statistic": PART, "penalty_of_units": PART}  # fmt: skip
    for case, said in seen.items():
        strategy, name = case.split()
        if name not in refused:
            assert said == "", case
        elif strategy != "bf16" or refused[name] is MEAN:  # parts may be within its rounding
            assert said.startswith("TaskError: Loss(total, items): "), (case, said)
            assert refused[name] in said, (case, said)
    assert "the total of term 2 of the loss" in seen["ddp a_mean_as_a_term"]


def test_samples_are_taken_from_batches_of_many_forms() -> None:
    x, names = torch.arange(8).reshape(4, 2), ["a", "b", "c", "d"]
    found = taken({"x": x, "more": (names, None, [x[:, 0]])}, [0, 1, 0, 1], 4)
    assert found["x"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert found["more"][0] == ["a", "b", "a", "b"]
    assert found["more"][1] is None
    assert found["more"][2][0].tolist() == [0, 2, 0, 2]
    # as many tensors as samples
    assert [part.tolist() for part in taken([x[:2], x[2:]], [1], 2)] == [[[2, 3]], [[6, 7]]]


@pytest.mark.parametrize("batch", [torch.zeros(()), {"count": 3}, "text", [torch.zeros(4), torch.zeros(3)]])
def test_batches_with_other_parts_are_left_alone(batch: Any) -> None:
    with pytest.raises(NotDivisible):
        taken(batch, [0], 4)
