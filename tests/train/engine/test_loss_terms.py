"""Losses of several terms and metrics of a loss: averages of one big batch, on real ranks; one message each."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.train.engine.loss_terms import HeldOutSums, as_terms
from launcher.train.world import World
from tests.helpers import printed_by

CASES = ("exact", "sharded", "unlogged", "resumed", "window_norm", "half", "shrunk", "messages")
ALL = ["accuracy", "far", "loss_boxes", "loss_classes", "positive"]
WITHOUT_BOXES = ["accuracy", "loss_classes", "positive"]
AHEAD = "when they were counted before its first backward pass"
# by case: what the message says on every rank
MESSAGES = {
    "a rank lacks a metric": "The ranks return different losses: rank 1 lacks the metric far of rank 0.",
    "a rank has one term": "rank 0 has 2 terms (term classes, term boxes), rank 1 1 term (term classes).",
    "a micro-batch lacks a metric": "than the first one: this one lacks the metric far of the first one",
    "a micro-batch has another term": "this one 3 terms (term classes, term boxes, term more).",
    "reserved": "Loss(metrics: 'grad_norm'): train/grad_norm is a metric of the launcher's own.",
    "slash": "Loss(metrics: '/top'): a name has letters, digits, and any of _ . @ -, and starts with a letter.",
    "twice": "The terms of the loss have accuracy twice.",
    "clash with a term": "The terms of the loss have loss_boxes twice.",
    "no pair": "The metric 'accuracy' of the loss is 0.5, and must be (sum, count)",
    "a vector": "The metric 'accuracy' of the loss has a tensor of shape [2], and must be two numbers",
    "a text": "The metric 'accuracy' of the loss has '1', and must be two numbers.",
    "a negative count": "The count of the metric 'accuracy' is -2, and must be a finite number, 0 or more.",
    "a nan count": "The count of the metric accuracy is nan over all ranks",
    "nan items of a term": "0 or more: rank 1, micro-batch 1: term boxes has nan; rank 1, micro-batch 2",
    "nan items of a term, one micro-batch": "0 or more: rank 1, micro-batch 1: term boxes has nan.",
    "items that change": f"The loss's term boxes had 18 items in this window {AHEAD}",
    "an empty list": "The loss of a micro-batch is a list, and must be a scalar tensor",
    "not known": "EngineMisuse: A loss of several terms needs the number of items of each term in the whole window",
    "not needed": "",
    "items(batch) of one term": "items(batch) returned 1 number for a loss of 2 terms.",
    "items(batch) is a number": "items(batch) returned a int for a loss of 2 terms.",
    "items(batch) is wrong": "and 12 in the window itself. Nothing was applied.",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all cases, of one start of two ranks."""
    found = printed_by(Path(__file__).parent / "terms_worker.py", list(CASES), 2, tmp_path_factory.mktemp("terms"))
    return {name: value for one in found for name, value in one.items()}


@pytest.mark.slow
def test_losses_metrics_and_parameters_of_one_big_batch(seen: dict[str, Any]) -> None:
    """Items counted by forward passes, by items(batch), and not ahead; a window without a box, and a short one."""
    exact = seen["exact"]
    assert exact["names"] == [ALL, WITHOUT_BOXES, ALL, ALL] * 3
    assert exact["loss"] < 1e-6
    assert exact["metrics"] < 1e-6
    assert exact["parameters"] < 1e-6


@pytest.mark.slow
def test_a_window_that_starts_again_gathers_its_shards_again(seen: dict[str, Any]) -> None:
    for policy, distances in seen["sharded"].items():
        assert max(distances) < 1e-6, policy


@pytest.mark.slow
def test_metrics_are_not_summed_in_steps_that_are_not_recorded(seen: dict[str, Any]) -> None:
    means = ["loss_boxes", "loss_classes"]
    assert seen["unlogged"] == [means, WITHOUT_BOXES, means, ALL]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(seen: dict[str, Any]) -> None:
    """Random numbers and buffers are as if the items had not been counted: three windows of three, one of one."""
    assert seen["resumed"] == {"same": True, "calls": 10.0}


@pytest.mark.slow
def test_batchnorm_over_the_window(seen: dict[str, Any]) -> None:
    assert seen["window_norm"] < 1e-6


@pytest.mark.slow
def test_fp16(seen: dict[str, Any]) -> None:
    assert not seen["half"]["skipped"]
    assert seen["half"]["error"] < 2e-3


@pytest.mark.slow
def test_out_of_memory_before_in_and_after_the_count(seen: dict[str, Any]) -> None:
    assert max(seen["shrunk"]) < 1e-6


@pytest.mark.slow
def test_one_message_each(seen: dict[str, Any]) -> None:
    for messages in seen["messages"]:  # of each rank
        assert messages.keys() == MESSAGES.keys()
        for case, text in MESSAGES.items():
            assert text in messages[case], (case, messages[case])
            assert bool(text) == bool(messages[case]), (case, messages[case])


@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_counts_that_were_rounded_are_warned_of(dtype: torch.dtype, exact: int) -> None:
    """One more than the largest whole number up to which all are exact is another number by the time it arrives."""
    total, kept = torch.zeros((), requires_grad=True), torch.ones(exact + 1, dtype=dtype)
    assert kept.sum() == exact
    message = f"in {str(dtype).removeprefix('torch.')}, which rounds whole numbers above {exact}"
    with pytest.warns(UserWarning, match=f"The number of items of a micro-batch is {message}"):
        as_terms(Loss(total, kept.sum()))
    with pytest.warns(UserWarning, match=f"The metric 'right' of the loss has a sum or count {message}"):
        as_terms(Loss(total, exact + 1, metrics={"right": (kept.sum(), len(kept))}))


def test_exact_counts_are_not_warned_of() -> None:
    total, kept = torch.zeros((), dtype=torch.bfloat16, requires_grad=True), torch.ones(300, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for items in (300, 300.5, kept.sum(), kept.float().sum(), kept.double().sum(), kept[0]):
            as_terms(Loss(total, items, metrics={"right": (items, items)}))


@pytest.mark.parametrize("items", [-1, math.nan, math.inf])
def test_held_out_items_that_are_no_count_are_refused_as_such(items: float) -> None:
    sums = HeldOutSums(World(rank=0, size=1, local_rank=0))
    sums.add([Loss(torch.tensor(2.0), 3)], 3)
    sums.add([Loss(torch.tensor(2.0), torch.tensor(items))], 1)
    with pytest.raises(TaskError, match="must be a finite number, 0 or more: that of the evaluation is not"):
        sums.averages()
