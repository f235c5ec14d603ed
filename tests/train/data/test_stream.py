"""Streams: read whole, in the same windows in every world, ended together, and not read again if they have a state."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from launcher.errors import ConfigError, DataError
from launcher.plan.data_shards import stream_info
from launcher.plan.run_plan import RunPlan
from launcher.train.data.stream import StreamCheckpoint, StreamState
from launcher.train.data.window_feed import WindowPosition, open_feed
from launcher.train.world import World
from tests.helpers import make_plan
from tests.train.data.feeds import CPU, Resumable, Stream, plan_for, read, run_resumably


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_stream_goes_on_where_it_was(loader_workers: int) -> None:
    """Two epochs of 40 samples in windows of 24, resumed before each of them, in its middle and in the next one."""
    options = ("train.epochs=2", "schedule=constant", f"train.loader_workers={loader_workers}")
    worlds = ((4, 1), (2, 3), (6, 4), (4, 5), (1, 7))
    for micro, ranks in worlds[:2] if loader_workers else worlds:
        plan = plan_for(micro, ranks, *options, "batch.uneven=true", samples=None)
        whole = read(plan, stream := Stream(40))
        assert [len(window) for window in whole] == [24, 16] * 2
        assert 1 in stream.epochs or loader_workers
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

    plan = plan_for(4, 2, "train.epochs=1", "schedule=constant", samples=None)
    windows = run_resumably(plan, lambda rank: Uneven((50, 9)[rank]))[0]
    assert sorted(chain(*windows)) == sorted([*range(50), *range(9)])
    assert len(windows) == 5  # 50 samples, 12 a window


LENGTH = 120
READS: list[int] = []


class Stateful(IterableDataset[int]):
    """Numbers, with the position in it as its state."""

    def __init__(self) -> None:
        self.position = self.start = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start, LENGTH):
            self.position = number + 1
            READS.append(number)
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class OfIterator(IterableDataset[int]):
    """The iterator has the state."""

    class Numbers:
        def __init__(self) -> None:
            self.state = [0]

        def __iter__(self) -> OfIterator.Numbers:
            return self

        def __next__(self) -> int:
            if self.state[0] == LENGTH:
                raise StopIteration
            self.state[0] += 1
            READS.append(self.state[0] - 1)
            return self.state[0] - 1

        def state_dict(self) -> dict[str, Any]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state["state"]

    def __iter__(self) -> Iterator[int]:
        return self.Numbers()


class Dropping(OfIterator):
    """The iterator draws when it is made, and leaves out samples at random later in the epoch."""

    class Numbers(OfIterator.Numbers):
        def __init__(self) -> None:
            super().__init__()
            torch.randperm(LENGTH)

        def __next__(self) -> int:
            number = super().__next__()
            return number if int(torch.randint(20, ())) else next(self)


class Refusing(Stateful):
    """Its state is refused when the stream is read, as by some streams of Hugging Face."""

    def __iter__(self) -> Iterator[int]:
        if self.start:
            raise KeyError("examples_iterable")
        yield from super().__iter__()


class Sharded(Stateful):
    """Each rank reads every other number."""

    sharded = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return (2 * number + self.rank for number in super().__iter__() if 2 * number + self.rank < LENGTH)


class Stateless(IterableDataset[int]):
    """Its order is chance, and so are its samples."""

    def __iter__(self) -> Iterator[int]:
        return (int(number) + 1000 * random.randrange(1000) for number in torch.randperm(LENGTH))


class OfObjects(Stateful):
    """A state that a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": Counter(read=self.position), "of": type(self)}


class Level(enum.StrEnum):
    low = "lowest"


class OfSubclasses(Stateful):
    """A state of types that JSON can hold, and that torch does not load."""

    def state_dict(self) -> dict[str, Any]:
        kinds = {"rate": np.float64(0.5), "seen": np.int64(3), "level": Level.low}
        return {**super().state_dict(), "more": collections.defaultdict(list, kinds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        more = state.pop("more")
        assert {key: (type(value), value) for key, value in more.items()} == {
            "rate": (float, 0.5), "seen": (int, 3), "level": (str, "lowest"),
        }  # fmt: skip
        super().load_state_dict(state)


class Buffered(Stateful):
    """A buffer that is not part of the state: a resume would leave out what it held."""

    def __iter__(self) -> Iterator[int]:
        numbers = super().__iter__()
        while buffer := list(itertools.islice(numbers, 10)):
            yield from reversed(buffer)


def run(plan: RunPlan, kind: Any, *options: Any, **named: Any) -> Resumable:
    return run_resumably(plan, lambda rank: kind(rank) if kind is Sharded else kind(), *options, **named)


def plan_of(micro: int, ranks: int, loader_workers: int = 0) -> RunPlan:
    options = ("train.epochs=2", "schedule=constant", "batch.uneven=true", f"train.loader_workers={loader_workers}")
    return plan_for(micro, ranks, *options, samples=None)


@pytest.mark.parametrize(("loader_workers", "kind"), [(0, OfIterator), (0, Sharded), (1, Sharded)])
def test_a_resume_reads_nothing_again(kind: Any, loader_workers: int) -> None:
    """At a window in the middle of each epoch, and at an epoch's last one."""
    plan = plan_of(4, 2, loader_workers)
    whole, _, _ = run(plan, kind)
    assert len(whole) == 10
    for after in (1, 4, 7) if not loader_workers else (7,):
        first, place, states = run(plan, kind, windows=after)
        READS.clear()
        rest, _, _ = run(plan, kind, place, states)
        assert first + rest == whole
        if not loader_workers:
            past = place.window * 24 // (2 if kind is Sharded else 1)
            assert READS[0] == past
            assert len(READS) <= 2 * ((2 - place.epoch) * LENGTH - past)


def test_a_state_of_subclasses_of_plain_types_is_saved() -> None:
    plan = plan_of(4, 2)
    whole, _, _ = run(plan, OfSubclasses)
    _, place, states = run(plan, OfSubclasses, windows=2)
    READS.clear()
    assert run(plan, OfSubclasses, place, states)[0] == whole[2:]
    assert READS[0] == 48, "nothing is read again"


def test_a_state_is_loaded_without_the_gpu_that_it_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, loaded = StreamCheckpoint(), StreamCheckpoint()
    saved.follow(lambda: [StreamState(1, None, 24, {"at": torch.ones(2)}, None, [])], 0, within_epoch=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
        state = saved.state_dict()
    loaded.load_state_dict([state])
    assert loaded.restored(1, 0, [0])[0].stream["at"].tolist() == [1, 1]  # pyright: ignore[reportOptionalSubscript]


def test_a_state_that_cannot_be_loaded_is_read_again() -> None:
    loaded = StreamCheckpoint()
    loaded.load_state_dict([{"states": torch.zeros(8, dtype=torch.uint8)}])
    assert loaded.restored(1, 0, [0]) is None


def test_random_numbers_continue_if_the_iterator_draws_when_it_is_made() -> None:
    """Samples that follow at once are often the same with other random numbers, too."""
    plan = plan_of(4, 2)
    whole, _, _ = run(plan, Dropping)
    for after in range(1, 4):
        _, place, states = run(plan, Dropping, windows=after)
        assert run(plan, Dropping, place, states)[0] == whole[after:]


def test_a_share_that_is_over_stays_over() -> None:
    """The last window has 7 samples: 4 on rank 0, 3 on rank 1 and none on rank 2."""

    class Short(Stateful):
        def __iter__(self) -> Iterator[int]:
            return itertools.takewhile(lambda number: number < 31, super().__iter__())

    plan = plan_of(4, 3)
    whole, _, _ = run(plan, Short)
    _, place, states = run(plan, Short, windows=1)
    READS.clear()
    assert run(plan, Short, place, states)[0] == whole[1:]
    assert READS[0] == 24


@pytest.mark.parametrize("kind", [Stateless, OfObjects, Buffered, Refusing])
def test_a_stream_without_a_state_that_can_be_saved_is_read_again(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(4, 2)
    whole, _, _ = run(plan, kind)
    _, place, states = run(plan, kind, windows=2)
    assert bool(states[0]) == (kind in (Buffered, Refusing))
    assert run(plan, kind, place, states)[0] == whole[2:]
    printed = capsys.readouterr().out
    if kind in (Buffered, Refusing):
        assert "does not lead to the samples that followed it" in printed
    else:
        assert "Without a saved state of the stream, the 2 windows of the epoch so far are read again." in printed
    assert ("The state of the stream has values that no checkpoint holds" in printed) == (kind is OfObjects)
    assert ("GLOBAL tests.train.data.test_stream.OfObjects" in printed) == (kind is OfObjects), "the value's class"
