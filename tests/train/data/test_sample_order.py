"""Order of the samples: the dataset's, or one's own with replacement, cut into the same windows in every world."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from launcher.errors import ConfigError, DataError, TaskError
from launcher.task import seed_everything
from launcher.train.data.sample_order import ArrangedData, indices_of
from launcher.train.data.window_feed import WindowPosition, open_feed
from launcher.train.world import World
from tests.train.data import order_tasks
from tests.train.data.feeds import CPU, plan_for, planned, read


def drawn(epoch: int, seed: int) -> WeightedRandomSampler:  # noqa: ARG001
    """70 of 103 samples, an odd index twice as often."""
    return WeightedRandomSampler([1.0 + index % 2 for index in range(103)], 70)


def test_without_shuffling_windows_hold_the_samples_in_their_order() -> None:
    for micro, ranks in ((24, 1), (4, 2), (3, 4)):
        plan = plan_for(micro, ranks, "train.epochs=2", "train.shuffle=false")
        windows = read(plan, list(range(103)))
        assert windows == [list(range(103))[at : at + 24] for at in range(0, 103, 24)] * 2
        assert read(plan, list(range(103)), WindowPosition(7)) == windows[7:]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_own_order_is_cut_into_the_same_windows_in_every_world(loader_workers: int) -> None:
    data = ArrangedData(list(range(103)), drawn)
    options = ("train.epochs=3", "batch.uneven=true", f"train.loader_workers={loader_workers}")
    plans = [plan_for(m, r, *options, samples=70) for m, r in ((24, 1), (4, 2), (2, 4), (5, 3))]
    assert {plan.train.steps for plan in plans} == {9}, "3 windows of 70 samples, 3 times"
    windows = read(plans[0], data)
    for plan in plans[1 : 2 if loader_workers else None]:
        assert read(plan, data) == windows
        assert read(plan, data, WindowPosition(4)) == windows[4:]
    orders = [indices_of(data, epoch, 0).tolist() for epoch in range(3)]
    assert [sorted(chain(*windows[at : at + 3])) for at in (0, 3, 6)] == [sorted(order) for order in orders]
    assert len({tuple(order) for order in orders}) == 3, "epochs differ"
    assert max(Counter(orders[0]).values()) > 1
    assert orders[0] != indices_of(data, 0, 1).tolist(), "and seeds"


def test_an_order_of_ones_own_does_not_touch_the_random_numbers_of_training() -> None:
    data = ArrangedData(list(range(103)), drawn)
    seed_everything(1)
    expected = torch.rand(1), random.random()
    seed_everything(1)
    indices_of(data, 0, 0)
    assert (torch.rand(1), random.random()) == expected


def test_balance_and_an_own_order_go_together() -> None:
    lengths = [1 + index * index for index in range(103)]
    data = ArrangedData(list(range(103)), drawn, lengths)
    plain = read(plan_for(4, 2, "train.epochs=2", samples=70), data)
    assert read(plan_for(4, 2, "train.epochs=2", "batch.balance=length", samples=70), data) == plain


@pytest.mark.parametrize("name", ["Weighted", "Loaded"])
def test_the_plan_counts_the_order(name: str) -> None:
    """Also if the DataLoader is returned whose sampler the method replaces."""
    task = planned(name)
    assert (task.samples, task.own_order) == (70, True)
    assert "The task's own order(epoch, seed) is used: 70 samples an epoch, of 90." in task.data_notes
    assert planned("Plain").samples == 90
    with pytest.raises(ConfigError, match=r"train.shuffle=false: has no effect: the task has a method order"):
        planned(name, "train.shuffle=false")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("too large", r"order\(0, seed\) returned the index 90 at position 2, and the training data has 90 samples"),
        ("negative", "returned the index -1 at position 1"),
        ("fractions", r"returned \[2\] indices of float32"),
        ("names", "returned no indices"),
        ("empty", r"returned \[0\] indices"),
        ("nothing", "returned no indices"),
        ("another each time", r"order\(0, seed\) returned other indices when it was called again"),
    ],
)
def test_what_is_no_order_is_refused_before_anything_starts(how: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        planned("WrongOrder", how=how)


def test_an_order_of_a_stream_is_refused() -> None:
    with pytest.raises(TaskError, match="its training data is a stream, which has no indices"):
        planned("OrderedStream")


def test_epochs_of_other_lengths_are_refused() -> None:
    data = ArrangedData(list(range(90)), order_tasks.WrongOrder("shorter").order)
    feed = open_feed(data, plan_for(6, 1, "train.epochs=2", samples=90), World(0, 1, 0), CPU)
    with pytest.raises(DataError, match=r"order\(1, seed\) returned 89 indices, and the plan was made for 90"):
        [list(window.micro_batches) for window in feed.windows()]
