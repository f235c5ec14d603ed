"""A stream with a state is not read again by a resume; any other one is, with the same windows."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from launcher.plan.run_plan import RunPlan
from tests.train.data.feeds import Resumable, Stream, plan_for, run_resumably

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


class Drawing(Stateful):
    """Its samples are drawn, too."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number + 1000 * random.randrange(1000) + 10**6 * int(torch.randint(1000, ()))


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


class OfObjects(Stateful):
    """A state that a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": Counter(read=self.position), "of": type(self)}


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


@pytest.mark.parametrize(
    ("loader_workers", "kind"),
    [*((0, kind) for kind in (Stateful, Drawing, OfIterator, Sharded)), (1, Drawing), (1, Sharded)],
)
def test_a_resume_reads_nothing_again(kind: Any, loader_workers: int) -> None:
    """At a window in the middle of each epoch, and at an epoch's last one."""
    plan = plan_of(4, 2, loader_workers)
    whole, _, _ = run(plan, kind)
    assert len(whole) == 10
    for after in (1, 4, 7) if not loader_workers else (7,):
        first, place, states = run(plan, kind, windows=after)
        assert bool(states[0]), "there is a state"
        assert bool(states[1]) == (kind is Sharded), "rank 0's is that of all ranks, of a stream that all read"
        READS.clear()
        rest, _, _ = run(plan, kind, place, states)
        assert first + rest == whole
        if not loader_workers:
            share = 2 if kind is Sharded else 1
            past = place.window * 24 // share
            assert READS[0] == past
            ranks = 2
            epochs_left = 2 - place.epoch
            assert len(READS) <= ranks * (epochs_left * LENGTH - past)


def test_random_numbers_continue_if_the_iterator_draws_when_it_is_made() -> None:
    """Samples that follow at once are often the same with other random numbers, too."""
    plan = plan_of(4, 2)
    whole, _, _ = run(plan, Dropping)
    for after in range(1, 4):
        _, place, states = run(plan, Dropping, windows=after)
        assert run(plan, Dropping, place, states)[0] == whole[after:]


@pytest.mark.parametrize("kind", [Stateful, Drawing])
def test_a_stream_that_all_ranks_read_resumes_at_another_world_size(kind: Any) -> None:
    whole, _, _ = run(plan_of(24, 1), kind)
    _, place, states = run(plan_of(4, 2), kind, windows=3)
    for micro, ranks in ((24, 1), (3, 2), (4, 3), (1, 7)):
        READS.clear()
        rest, _, _ = run(plan_of(micro, ranks), kind, place, states)
        assert rest == whole[3:]
        assert READS[0] == 3 * 24


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


@pytest.mark.parametrize("kind", [Stream, OfObjects, Buffered, Refusing])
def test_a_stream_without_a_state_that_can_be_saved_is_read_again(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = (lambda: Stream(LENGTH)) if kind is Stream else kind
    plan = plan_of(4, 2)
    whole, _, _ = run(plan, made)
    _, place, states = run(plan, made, windows=2)
    assert bool(states[0]) == (kind in (Buffered, Refusing))
    assert run(plan, made, place, states)[0] == whole[2:]
    printed = capsys.readouterr().out
    if kind in (Buffered, Refusing):
        assert "does not lead to the samples that followed it" in printed
    else:
        assert "Without a saved state of the stream, the 2 windows of the epoch so far are read again." in printed
    assert ("The state of the stream has values that no checkpoint holds" in printed) == (kind is OfObjects)


@pytest.mark.nightly  # needs Hugging Face's datasets, which the suite does not install
@pytest.mark.parametrize("shuffled", [False, True])
def test_streams_of_hugging_face(shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read on where they were; those with a shuffle buffer, whose samples are not in their state, are read again."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets")

    def make() -> Any:
        stream = library.Dataset.from_dict({"x": list(range(LENGTH))}).to_iterable_dataset(num_shards=4)
        stream = stream.map(lambda row: {"x": READS.append(row["x"]) or row["x"]})
        return Numbers(stream.shuffle(seed=1, buffer_size=20) if shuffled else stream)

    class Numbers(IterableDataset[int]):
        """The column x."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream
            self.set_epoch = stream.set_epoch
            self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

        def __iter__(self) -> Iterator[int]:
            return (row["x"] for row in self.stream)

    plan = plan_of(4, 2)
    whole, _, _ = run(plan, make)
    _, place, states = run(plan, make, windows=3)
    READS.clear()
    assert run(plan, make, place, states)[0] == whole[3:]
    again = Counter(READS)
    if shuffled:
        assert sum(again.values()) > 2 * (2 * LENGTH - 3 * 24), "all of the first epoch, by both ranks"
    else:
        assert sum(again.values()) <= 2 * (2 * LENGTH - 3 * 24)
