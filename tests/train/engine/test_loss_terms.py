"""Checks of a loss's terms and metrics."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.train.engine.loss_terms import HeldOutSums, as_terms
from launcher.train.world import World


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
