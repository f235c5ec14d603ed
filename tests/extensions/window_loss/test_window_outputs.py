"""Losses of a whole window (outputs and window_loss): those of plain PyTorch on one big batch; one message each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import TaskError
from launcher.loss import loss_form
from tests.helpers import printed_by

WORKER = Path(__file__).parent / "window_outputs_worker.py"
ITEMS = [12, 12, 7, 12]
# by mistake: what the message says on every rank
MESSAGES = {
    "noise": "TaskError: The outputs of a micro-batch differ between the two passes that window_loss needs: others.",
    "a scalar": "outputs() returned a scalar tensor, and must return tensors with one row for each sample",
    "a number": "outputs() returned a float, and must return tensors",
    "fewer rows": "outputs() returned a tensor of shape [1, 6] for 2 samples",
    "another dtype": "float64 [6], float64 [6], float64 [], int64 [] on rank 0, and ",
    "another shape": "outputs() returned ",
    "complex": "outputs() returned a complex tensor.",
    "a list": "window_loss() returned a list of Loss.",
    "detached": "The result of window_loss does not depend on the outputs",
    "a parameter": "window_loss uses a parameter of shape [1] itself, which would get no gradient.",
    "a vector": "must be a scalar tensor: the sum over its items.",
}


def seen(ranks: int, cases: list[str], path: Path) -> dict[str, Any]:
    return {name: value for one in printed_by(WORKER, cases, ranks, path) for name, value in one.items()}


def require_exact(cases: dict[str, Any]) -> None:
    for case, found in cases.items():
        assert found["items"] == ITEMS, (case, found)
        limit = 1e-6 if case.startswith(("fsdp", "hsdp")) else 1e-12  # FSDP sums the gradients of fp64 in fp32
        assert max(found["loss"], found["accuracy"], found["parameters"]) < limit, (case, found)
        assert not found["noise"], "there is no noise scale of a loss that is no mean"


def require_evaluated(cases: dict[str, Any]) -> None:
    for case, (values, expected) in cases.items():
        assert values == pytest.approx(expected, rel=1e-9), case


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    found = seen(1, ["exact", "evaluation"], tmp_path)
    assert len(found["exact"]) == 5
    require_exact(found["exact"])
    require_evaluated(found["evaluation"])


@pytest.mark.slow
def test_narrow_formats_and_mistakes(tmp_path: Path) -> None:
    found = seen(2, ["narrow", "messages"], tmp_path)
    bf16, fp16, wrong = (found["narrow"][name] for name in ("bf16", "fp16", "each alone"))
    assert max(bf16["loss"], bf16["parameters"]) < 0.02
    assert max(fp16["loss"], fp16["parameters"]) < 0.003, fp16
    assert fp16["skipped"] < 3
    assert wrong["parameters"] > 0.1, "the comparison sees a loss of each micro-batch by itself"
    assert set(found["messages"]) == set(MESSAGES)
    for mistake, text in MESSAGES.items():
        assert all(text in message for message in found["messages"][mistake]), (mistake, found["messages"][mistake])


@pytest.mark.slow
def test_ranks_with_one_row_or_none(tmp_path: Path) -> None:
    """Rows of several widths, where one row of a part is contiguous at any offset."""
    found = seen(2, ["few_rows"], tmp_path)["few_rows"]
    assert not found["wrong"]
    assert found["run"]["items"] == [12, 12, 1, 12]
    assert max(found["run"][each] for each in ("loss", "accuracy", "parameters")) < 1e-12, found["run"]


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """Some ranks have no sample in a micro-batch of the short window."""
    found = seen(4, ["exact", "evaluation"], tmp_path)
    assert len(found["exact"]) == 10
    require_exact(found["exact"])
    require_evaluated(found["evaluation"])


class Half:
    def window_loss(self, outputs: Any) -> Any:
        return outputs.var()


class Both(Half):
    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).sum()


class Scalar(Half):
    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch).sum()


def test_a_task_with_a_part_of_it_or_with_two_losses() -> None:
    assert loss_form(Half()) is None, "the owner of a loop may have a method of that name"
    with pytest.raises(TaskError, match=re.escape(f"{__name__}.Both: the class has both loss and window_loss.")):
        loss_form(Both())


def test_rows_of_a_batch_on_its_own_are_checked() -> None:
    form = loss_form(Scalar())
    assert form is not None
    with pytest.raises(TaskError, match=r"outputs\(\) returned a scalar tensor"):
        form.of_batch(torch.nn.Linear(2, 1), torch.ones(3, 2))
