"""Feeds: a window's members do not depend on the world, nothing is lost, streams end together."""

from __future__ import annotations

import itertools
import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from launcher.errors import DataError
from launcher.train.data import window_feed
from launcher.train.data.sample_order import ArrangedData
from launcher.train.data.window_feed import WindowPosition, open_feed
from launcher.train.world import World
from tests.helpers import make_plan
from tests.train.data.feeds import CPU, Stream, plan_for, read


@pytest.mark.parametrize("loader_workers", [0, 2, pytest.param(1, marks=pytest.mark.nightly)])
def test_members_of_a_window_are_the_same_in_every_world(loader_workers: int) -> None:
    data = list(range(103))
    worlds = [(24, 1), (3, 1), (4, 2), (2, 4), (1, 8), (4, 5), (5, 3), (1, 7), (2, 30)]
    if loader_workers:  # each rank of each world starts them, twice
        worlds = [(24, 1), (5, 3)]
    options = ("train.epochs=2", f"train.loader_workers={loader_workers}", "batch.uneven=true")
    plans = [plan_for(m, r, *options) for m, r in worlds]
    seen = [read(plan, data) for plan in plans]
    assert all(windows == seen[0] for windows in seen)
    assert [len(window) for window in seen[0]] == [24, 24, 24, 24, 7] * 2
    first, second = seen[0][:5], seen[0][5:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == data, "an epoch holds every sample once"
    assert first != second, "epochs differ in order"
    assert read(plans[1], data, WindowPosition(7)) == seen[0][7:]


class Unreadable(list[int]):
    def __getitem__(self, index: Any) -> Any:
        if index == 50:
            raise KeyError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_samples_are_named(loader_workers: int) -> None:
    plan = plan_for(3, 2, "train.epochs=1", f"train.loader_workers={loader_workers}")
    names: list[str] = []
    for rank in range(2):
        feed = open_feed(list(range(103)), plan, World(rank, 2, rank), CPU)
        for micro in chain.from_iterable(window.micro_batches for window in feed.windows()):
            name, indices = feed.samples_text(micro.note), micro.data.tolist()
            assert name.split(" ", 1)[1] == ", ".join(map(str, indices))
            names += [name] * (50 in indices)
        feed.close()
    text: list[str] = []
    for rank in range(2):
        feed = open_feed(Unreadable(range(103)), plan, World(rank, 2, rank), CPU)
        try:
            list(chain.from_iterable(window.micro_batches for window in feed.windows()))
        except (KeyError, DataError) as error:
            text += [str(error), *getattr(error, "__notes__", ())]
        feed.close()
    assert f"In a micro-batch of {names[0]} of the dataset." in "".join(text)
    assert "no such file" in text[0]


class Drawing(torch.utils.data.Dataset[Any]):
    """Random samples of each kind. Only one in ``every`` draws a number, of the kind that comes up."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> Any:
        if self.every == 1:
            return index, random.random(), torch.rand(1).item(), np.random.rand(), np.random.normal()
        if index % self.every:
            return index, torch.initial_seed()  # as some augmentations seed a generator of their own
        draw = (random.random, lambda: torch.rand(1).item(), np.random.rand)[index // self.every % 3]
        return index, draw()


def drawn(
    ranks: int, loader_workers: int, dataset: Any, *options: str, start: int = 0, micro: int = 2
) -> dict[int, Any]:
    """Return the number that each sample drew in the first epoch."""
    plan = plan_for(micro, ranks, f"train.loader_workers={loader_workers}", "batch.uneven=true", *options)
    seen: dict[int, Any] = {}
    for rank in range(ranks):
        feed = open_feed(dataset, plan, World(rank, ranks, rank), CPU, collate=list, start=WindowPosition(start))
        for window in itertools.islice(feed.windows(), 4 - start):
            for batch in window.micro_batches:
                seen |= {index: rest for index, *rest in batch.data}
        feed.close()
    return seen


@pytest.mark.parametrize("every", [1, 10])
def test_what_a_sample_draws_depends_on_its_place_only(every: int) -> None:
    """Two generators are not seeded until a read draws from one: that read is repeated, and no sample may notice."""
    data = Drawing(every)
    here = drawn(1, 0, data)
    if every == 1:
        assert len({tuple(rest) for rest in here.values()}) == len(here) == 96, "and no two draw alike"
    else:
        assert sum(isinstance(drawn, float) for (drawn,) in here.values()) >= 9
    for ranks, workers, micro in ((2, 1, 2), (3, 0, 2), (5, 0, 4)):
        assert drawn(ranks, workers, data, micro=micro) == here
    by_length = ArrangedData(data, lengths=[1 + index % 7 for index in range(103)])
    assert drawn(2, 0, by_length, "batch.balance=length") == here
    resumed = drawn(2, 1, data, start=2)
    assert resumed == {index: rest for index, rest in here.items() if index in resumed}
    assert len(resumed) == 48


def test_a_data_set_that_draws_nothing_is_read_once() -> None:
    reads: list[int] = []

    class Counting(Drawing):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return index, None

    assert sorted(drawn(1, 0, Counting())) == sorted(reads)


class ReadsSeveral(torch.utils.data.Dataset[float]):
    """``__getitems__`` reads a micro-batch at once, as torch's DataLoader allows. ``draws``: samples are noisy."""

    def __init__(self, *, draws: bool) -> None:
        self.draws, self.calls = draws, 0

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> float:
        return index + (random.random() if self.draws else 0.0)

    def __getitems__(self, indices: list[int]) -> list[float]:
        self.calls += 1
        return [ReadsSeveral.__getitem__(self, index) for index in indices]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_a_dataset_may_read_several_samples_at_once(draws: bool, part: bool) -> None:
    """Then with the numbers that each sample draws when it is read alone."""
    data = ReadsSeveral(draws=draws)
    dataset = torch.utils.data.Subset(data, [*reversed(range(103))]) if part else data
    first = read(plan_for(4, 1, "train.steps=5"), dataset)
    samples = [*chain(*first)]
    assert data.calls == 1 if draws else data.calls >= len(samples) // 4
    assert read(plan_for(4, 2, "train.steps=5"), dataset) == first
    assert draws or samples == [*map(round, samples)]


class Doubled(ReadsSeveral):
    """``__getitems__`` of the base class does not know of it."""

    def __getitem__(self, index: int) -> float:
        return 2.0 * index


class Forwards:
    """A wrapper that has every attribute of what is in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: int) -> Any:
        return 2 * self.inner[index]


class Columns(ReadsSeveral):
    """Returns columns where samples are expected."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"values": [2.0 * index for index in indices]}

    def __getitem__(self, index: int) -> float:
        return 2.0 * index


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(draws=False), Forwards(ReadsSeveral(draws=False)), Columns(draws=False),
        torch.utils.data.Subset(Columns(draws=False), torch.arange(103)),  # pyright: ignore
    ],
)  # fmt: skip
def test_a_dataset_is_read_by_its_own_method(dataset: Any) -> None:
    batch = window_feed.Samples(dataset, list, 0).batch([3, 1, 3], 0, range(3))
    assert [float(value) for value in batch] == [6.0, 2.0, 6.0]


@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_tensors_are_the_batch_of_their_samples(kind: str) -> None:
    inputs, labels = torch.randn(103, 3, 2), torch.randint(9, (103,))
    inputs = torch.nn.Parameter(inputs) if kind == "parameter" else inputs
    data = torch.utils.data.TensorDataset(inputs, labels)
    part = torch.utils.data.Subset(torch.utils.data.Subset(data, [*range(3, 103)]), [*range(0, 100, 7)])
    drawn = torch.utils.data.Subset(data, torch.randperm(103)[:9])  # pyright: ignore
    arrays = torch.utils.data.Subset(data, np.arange(103)[::-1])  # pyright: ignore
    for dataset in (data, part, drawn, arrays):
        indices = [0, 5, 2, 5]
        batch = window_feed.Samples(dataset, default_collate, 0).batch(indices, 0, range(4))
        wanted = default_collate([dataset[index] for index in indices])
        assert [type(tensor) for tensor in batch] == [type(tensor) for tensor in wanted]
        assert [tensor.dtype for tensor in batch] == [tensor.dtype for tensor in wanted]
        assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))


@pytest.mark.parametrize("data", [list(range(90)), ArrangedData(list(range(103)), lambda *_: range(90))])
def test_another_length_than_the_plans_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="has 90 samples on rank 0, and the plan was made for 103"):
        open_feed(data, plan_for(3, 2), World(0, 2, 0), CPU)


@pytest.mark.parametrize("stream", [False, True])
def test_a_ramp_has_the_same_windows_in_every_world(stream: bool) -> None:
    """100 samples: windows of 8, then of 16, then of 24, across the ends of epochs."""

    def windows(*overrides: str, start: int = 0) -> list[list[int]]:
        plan = make_plan(
            "batch.global_size=24", "batch.ramp=[[3,8],[9,16]]", "train.epochs=3", "schedule=constant",
            "schedule.warmup_steps=0", "train.loader_workers=0", *overrides, samples=None if stream else 100,
        )  # fmt: skip
        return read(plan, Stream(100) if stream else list(range(100)), WindowPosition(start))

    one = windows("cluster.workers_per_node=1", "batch.micro_size=8", "strategy=single")
    sizes = [len(window) for window in one]
    # 24 + 4 x 16 + 12; 5 x 16 + 20; then 4 x 24 + 4
    assert sizes == [8, 8, 8, 16, 16, 16, 16, 12, 16, 16, 16, 16, 24, 12, 24, 24, 24, 24, 4]
    for world, micro in ((2, 4), (4, 2), (8, 1), (2, 2)):
        assert windows(f"cluster.workers_per_node={world}", f"batch.micro_size={micro}") == one
    samples = sorted(chain.from_iterable(one[:8]))
    assert samples == list(range(100)), "an epoch is every sample once"
    for at in () if stream else (1, 3, 7, 8, 12, 15):
        assert windows("cluster.workers_per_node=1", "batch.micro_size=2", start=at) == one[at:]


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_data() -> None:
    class Ends:
        def __len__(self) -> int:
            return 103

        def __getitem__(self, index: int) -> int:
            raise StopIteration

    feed = open_feed(Ends(), plan_for(2, 1, "train.loader_workers=0"), World(0, 1, 0), CPU, collate=list)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(next(iter(feed.windows())).micro_batches)
