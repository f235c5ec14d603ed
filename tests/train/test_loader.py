"""Handing micro-batches over: whatever a collate returns arrives as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from launcher.train.loader import BY_VALUE_BYTES, prefetch, to_device
from tests.helpers import make_plan

CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


class Given(torch.utils.data.Dataset[tuple[Any, int]]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.items[index], index


ITEMS: list[Any] = [
    torch.arange(6).reshape(2, 3),
    torch.randn(3, 4, dtype=torch.bfloat16).t(),
    torch.zeros(0, 5),
    torch.tensor(2.5),
    torch.ones(BY_VALUE_BYTES),
    torch.eye(4).to_sparse(),
    {"a": [torch.tensor([True, False]), "text"], "b": Pair(torch.tensor([1j]), "x")},
    None,
    17,
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a.to_dense() == b.to_dense()).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(same, a, b))
    return a == b


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_everything_arrives_as_it_was_and_in_order(workers: int) -> None:
    plan = make_plan(f"train.loader_workers={workers}")
    order = [*range(len(ITEMS)), *range(len(ITEMS))]
    seen = list(prefetch(Given(ITEMS), plan, CPU, 0, order))
    assert [batch.samples for batch in seen] == order
    for batch in seen:
        assert same(ITEMS[batch.samples], batch.data)


def test_a_tensor_that_arrives_may_be_written_to() -> None:
    (batch,) = prefetch(Given(ITEMS), make_plan(), CPU, 0, [0])
    batch.data.add_(1)
    assert batch.data[0, 0] == 1


def test_a_failing_dataset_says_where() -> None:
    with pytest.raises(IndexError, match="list index out of range"):
        list(prefetch(Given(ITEMS), make_plan(), CPU, 0, [100]))


def test_to_device_keeps_structure() -> None:
    meta = torch.device("meta")
    moved = to_device({"a": [torch.ones(2), "text"], "b": Pair(torch.ones(1), "x")}, meta)
    assert moved["a"][0].device == meta
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Pair)
