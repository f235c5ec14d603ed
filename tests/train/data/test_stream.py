"""Streams: read whole, in the same windows in every world, and ended together."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from launcher.errors import ConfigError, DataError
from launcher.plan.data_shards import stream_info
from launcher.train.data.window_feed import WindowPosition, open_feed
from launcher.train.world import World
from tests.helpers import make_plan
from tests.train.data.feeds import CPU, Stream, advance, over, plan_for, read


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_stream_goes_on_where_it_was(loader_workers: int) -> None:
    """Two epochs of 40 samples in windows of 24, resumed before each of them, in its middle and in the next one."""
    options = ("train.epochs=2", "schedule=constant", f"train.loader_workers={loader_workers}")
    worlds = ((4, 1), (2, 3), (6, 4), (4, 5), (1, 7))
    for micro, ranks in worlds[:2] if loader_workers else worlds:
        plan = plan_for(micro, ranks, *options, "batch.uneven=true", samples=None)
        whole = read(plan, Stream(40))
        places = [WindowPosition(0), WindowPosition(1, 0, 1), WindowPosition(2, 1, 0), WindowPosition(3, 1, 1)]
        assert [read(plan, Stream(40), place) for place in places] == [whole[n:] for n in range(4)]


def test_a_rank_whose_share_of_a_stream_has_ended_keeps_its_stand_in() -> None:
    class Uneven(Stream):
        sharded = True

    plan = plan_for(4, 2, "train.epochs=1", "schedule=constant", samples=None)
    feed = open_feed(Uneven(9), plan, World(1, 2, 1), CPU, start=WindowPosition(2, 0, 2))
    window = next(feed.windows())
    assert not feed.has_next()
    assert [(batch.samples, batch.data.tolist()) for batch in window.micro_batches] == [(0, [8])] * 3


@pytest.mark.parametrize(("loader_workers", "length"), [*((0, length) for length in (1, 23, 24, 25, 96, 103)), (1, 25)])
def test_a_stream_is_read_whole_and_its_windows_do_not_depend_on_the_world(length: int, loader_workers: int) -> None:
    options = ["train.epochs=1", "schedule=constant", f"train.loader_workers={loader_workers}"]
    alone = read(plan_for(4, 1, *options, samples=None), Stream(length))
    assert alone == [list(range(length))[at : at + 24] for at in range(0, length, 24)]
    for micro, ranks in ((4, 5), (4, 2), (3, 4))[: 1 if loader_workers else 3]:
        assert read(plan_for(micro, ranks, *options, "batch.uneven=true", samples=None), Stream(length)) == alone


class Shuffling(IterableDataset[Any]):
    """One whose order, and whose samples, are chance."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(60).tolist()
        while order:
            yield order.pop(random.randrange(len(order))) + 1000 * np.random.randint(1000)


def test_a_stream_that_draws_comes_alike_in_every_world() -> None:
    options = ("train.epochs=1", "schedule=constant", "batch.uneven=true")
    alone = read(plan_for(24, 1, *options, samples=None), Shuffling())
    assert sorted(sample % 1000 for window in alone for sample in window) == list(range(60))
    for micro, ranks in ((4, 1), (4, 2), (3, 4), (4, 5)):
        plan = plan_for(micro, ranks, *options, samples=None)
        assert read(plan, Shuffling()) == alone
        assert read(plan, Shuffling(), WindowPosition(1, 0, 1)) == alone[1:]


def test_a_rank_may_have_no_sample_of_a_window_and_some_of_the_next() -> None:
    options = ("train.steps=4", "batch.ramp=[[2,4]]", "batch.uneven=true")
    for ranks in (1, 6):
        plan = plan_for(1, ranks, *options, samples=None)
        windows = read(plan, Stream(100))
        assert [len(window) for window in windows] == [4, 4, 24, 24]
        assert list(chain(*windows)) == list(range(56))


def test_a_rank_without_any_sample_of_its_own_is_an_error() -> None:
    class Own(Stream):
        sharded = True

    plan = plan_for(4, 2, "train.epochs=1", "schedule=constant", samples=None)
    for stream in (Own(0), Stream(0)):
        with pytest.raises(DataError, match="Rank 1 got no sample"):
            next(open_feed(stream, plan, World(1, 2, 1), CPU).windows()).micro_batches.__next__()


def test_an_iterator_is_refused_for_several_epochs() -> None:
    several, steps = ("train.epochs=2", "schedule=constant"), ("train.steps=9",)
    one = ("train.epochs=1", "schedule=constant")

    class Again(Iterator[int]):
        """One that starts again in ``__iter__``."""

        def __iter__(self) -> Again:
            self.left = list(range(30))
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    for make in (lambda: (n for n in range(30)), lambda: map(int, range(30)), lambda: iter([*range(30)])):
        plan = plan_for(4, 2, *several, samples=None)
        with pytest.raises(ConfigError, match=r"train.epochs=2: .* only once[\s\S]*__iter__ starts"):
            open_feed(make(), plan, World(0, 2, 0), CPU)
        task = dataclasses.replace(plan.task, stream=stream_info(make()))
        with pytest.raises(ConfigError, match=r"train.epochs=2: .* only once"):
            make_plan(*several, task=task)
        for right in (one, steps):
            make_plan(*right, task=task)
        assert len(read(plan_for(4, 1, *one, samples=None), make())) == 2
    for stream in (Again(), Stream(30), [1]):
        assert not stream_info(stream).single_pass
    whole = [[*range(24)], [*range(24, 30)]]
    assert read(plan_for(4, 1, *several, samples=None), Again()) == whole * 2


def test_a_second_epoch_without_samples_is_explained() -> None:
    class Wrapped(IterableDataset[int]):
        def __init__(self) -> None:
            self.samples = iter(range(30))

        def __iter__(self) -> Iterator[int]:
            return self.samples

    for data, options in ((Wrapped(), "train.epochs=2"), (iter(range(30)), "train.steps=9")):
        plan = plan_for(4, 1, options, "schedule=constant", samples=None)
        with pytest.raises(DataError, match=r"no sample from the stream in epoch 2, after 1 epoch with samples.*once"):
            read(plan, data)


def test_ranks_of_unequal_length_end_together() -> None:
    """A stream that shards itself unevenly: weight zero for the rank that is through."""

    class Uneven(Stream):
        sharded = True

    size = 2
    plan = plan_for(4, size, "train.epochs=1", "schedule=constant", samples=None)
    feeds = [open_feed(Uneven(n), plan, World(rank, size, rank), CPU) for rank, n in enumerate((50, 9))]
    streams = [feed.windows() for feed in feeds]
    counted, windows = [0, 0], 0
    ended = False
    while not ended:
        windows += 1
        for rank, stream in enumerate(streams):
            window = next(stream)
            counted[rank] += sum(batch.samples for batch in window.micro_batches)
        ended = over(plan, advance(feeds))
    assert counted == [50, 9]
    assert windows == 5  # 50 samples, 12 a window


def test_streams_start_again_for_the_next_epoch() -> None:
    stream = Stream(30)
    windows = read(plan_for(4, 2, "train.epochs=2", "schedule=constant", samples=None), stream)
    assert [len(window) for window in windows] == [24, 6] * 2
    assert 1 in stream.epochs
