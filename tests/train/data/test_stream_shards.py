"""Streams that are divided by shards: the same windows in every world, whoever reads them, and after every resume."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from launcher.errors import ConfigError, DataError, WrongCheckpoint
from launcher.plan.data_shards import Division, data_shards_text, own_shards, stream_info
from launcher.plan.run_plan import RunPlan
from launcher.plan.windows import StreamInfo
from launcher.task import seed_for, train_data
from launcher.train.checkpoint.origin import origin_of, require_same_run
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.window_feed import BEGINNING, open_feed
from launcher.train.world import World
from tests.helpers import make_plan
from tests.train.data.feeds import CPU, Stream, plan_for, read, run_resumably

FILES = (40, 3, 25, 31, 0, 28, 30, 26)
READS: list[int] = []


class Files(IterableDataset[int]):
    """Files of unequal lengths; sample 1000 f + i is number i of file f."""

    def __init__(self, files: tuple[int, ...] = FILES) -> None:
        self.files = [(number, length) for number, length in enumerate(files)]

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Any:
        part = copy.copy(self)
        part.files = self.files[index::num_shards]
        return part

    def __iter__(self) -> Iterator[int]:
        for number, length in self.files:
            for at in range(length):
                READS.append(1000 * number + at)
                yield 1000 * number + at


class Stateful(Files):
    """The number of samples read is its state."""

    position = start = 0

    def __iter__(self) -> Iterator[int]:
        samples = [1000 * number + at for number, length in self.files for at in range(length)]
        for position in range(self.start, len(samples)):
            self.position = position + 1
            READS.append(samples[position])
            yield samples[position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


class Drawing(Stateful):
    """Its samples are chance, of all three generators."""

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            chance = int(torch.randint(100, ())) + 100 * random.randrange(100) + 10**4 * np.random.randint(100)
            yield sample + 10**5 * chance


class Generated(Files):
    """A shallow copy shares its generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return (sample + 10**5 * self.generator.randrange(100) for sample in super().__iter__())


def plan_of(shards: int, ranks: int, loader_workers: int = 0, *options: str) -> RunPlan:
    fixed = ("train.epochs=2", "schedule=constant", f"train.data_shards={shards}")
    return plan_for(2, ranks, *fixed, f"train.loader_workers={loader_workers}", *options, samples=None)


def reference(stream: Any, shards: int) -> list[list[int]]:
    """The windows of two epochs, by plain loops over shards that are read one after the other."""
    windows: list[list[int]] = []
    for epoch in range(2):
        parts: list[list[int]] = []
        for index in range(shards):
            own = SampleRandom(0 if shards == 1 else seed_for(0, f"shard/{index}"))
            part = stream if shards == 1 else copy.deepcopy(stream).shard(shards, index)
            with own.own():
                own.seed(epoch, -1)
                parts.append(list(copy.deepcopy(part)))
        at, each = 0, 24 // shards
        while any(part[at:] for part in parts):
            windows.append(sorted(sample for part in parts for sample in part[at : at + each]))
            at += each
    return windows


@pytest.mark.parametrize("shards", [1, 4, 6])
@pytest.mark.parametrize("kind", [Drawing, Generated])
def test_windows_are_those_of_the_shards_in_every_world(kind: Any, shards: int) -> None:
    expected = reference(kind(), shards)
    samples = [sample % 10**5 for window in expected for sample in window]
    assert sorted(samples) == sorted([1000 * f + i for f, length in enumerate(FILES) for i in range(length)] * 2)
    if kind is Generated and shards == 1:
        return  # a generator of its own continues in the next epoch
    for ranks in (1, 2, 3, 4):
        assert read(plan_of(shards, ranks), kind()) == expected, ranks


@pytest.mark.parametrize(("shards", "ranks", "workers", "processes"), [
    (1, 2, 2, 1), (4, 1, 2, 2), (6, 1, 2, 2), (6, 3, 2, 2), (4, 4, 2, 1), (4, 3, 2, 1), (4, 2, 1, 1),
])  # fmt: skip
def test_loader_processes_read_shards_of_their_own(shards: int, ranks: int, workers: int, processes: int) -> None:
    plan = plan_of(shards, ranks, workers)
    assert Division.of(plan).processes == processes
    assert read(plan, Drawing()) == reference(Drawing(), shards)


def test_loader_processes_make_whole_micro_batches_of_every_window() -> None:
    options = ("batch.ramp=[[1,12],[1,18]]", "train.data_shards=6")
    for ranks, processes in ((1, 3), (2, 3), (3, 2)):
        plan = plan_for(1, ranks, "train.steps=9", *options, "train.loader_workers=4", samples=None)
        assert Division.of(plan).processes == processes
    uneven = plan_for(5, 1, "train.steps=9", "train.data_shards=4", "batch.uneven=true", samples=None)
    assert Division.of(uneven).processes == 1


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_rank_reads_its_own_shards_only(shards: int) -> None:
    plan = plan_of(shards, 2)
    for rank in range(2):
        feed = open_feed(Stateful((40,) * 4), plan, World(rank, 2, rank), CPU)
        READS.clear()
        windows = feed.windows()
        for _ in range(3):
            for _ in next(windows).micro_batches:
                pass
            feed.advance(True)
        files = {sample // 1000 for sample in READS}
        assert files == {0, 1} if shards == 1 else files <= {rank, rank + 2}


@pytest.mark.parametrize(("kind", "shards", "every"), [(Stateful, 4, 1), (Drawing, 4, 4), (Drawing, 1, 3)])
def test_a_resume_in_any_world_reads_nothing_again(kind: Any, shards: int, every: int) -> None:
    """At windows of an epoch: of four ranks, and continued in other worlds."""
    whole = reference(kind(), shards)
    assert run_resumably(plan_of(shards, 1), lambda _: kind())[0] == whole
    for after in range(1, len(whole) // 2, every):
        first, place, states = run_resumably(plan_of(shards, 4), lambda _: kind(), windows=after)
        assert first == whole[:after]
        assert [bool(state) for state in states] == [True] + [shards == 4] * 3, "rank 0 saves what all ranks read"
        for ranks in (4, 2, 1, 3):
            READS.clear()
            rest, _, _ = run_resumably(plan_of(shards, ranks), lambda _: kind(), place, states)
            assert rest == whole[after:]
            past = {sample % 10**5 for window in first for sample in window}
            readers = 1 if shards % ranks == 0 else ranks
            left = sum(FILES) - len(past)
            stand_ins = 2 * ranks  # of ranks whose shards are over: a sample for their weight of zero
            assert len(READS) <= readers * (left + sum(FILES)) + stand_ins


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resume_of_loader_processes(workers: int) -> None:
    whole = reference(Drawing(), 4)
    for ranks in (1, 3):
        _, place, states = run_resumably(plan_of(4, ranks, workers), lambda _: Drawing(), windows=3)
        rest, place, states = run_resumably(plan_of(4, 2, workers), lambda _: Drawing(), place, states, windows=2)
        READS.clear()
        assert rest + run_resumably(plan_of(4, 1), lambda _: Drawing(), place, states)[0] == whole[3:]
        assert len(READS) == 2 * sum(FILES) - sum(len(window) for window in whole[:5])


def test_a_stream_without_a_state_is_read_again_in_its_shards(capsys: pytest.CaptureFixture[str]) -> None:
    whole = reference(Files(), 4)
    _, place, states = run_resumably(plan_of(4, 4), lambda _: Files(), windows=3)
    for ranks in (1, 4, 3):
        assert run_resumably(plan_of(4, ranks), lambda _: Files(), place, states)[0] == whole[3:]
        assert "the 3 windows of the epoch so far are read again" in capsys.readouterr().out


def test_a_stream_with_other_files_is_refused_within_an_epoch() -> None:
    """Also one without a state."""
    for kind in (Files, Stateful):
        _, place, states = run_resumably(plan_of(4, 2), lambda _: kind(), windows=3)  # noqa: B023
        with pytest.raises(WrongCheckpoint, match="The stream has 9 shards of its own, and had 8"):
            run_resumably(plan_of(4, 2), lambda _: kind((*FILES, 9)), place, states)  # noqa: B023
        run_resumably(plan_of(4, 2), lambda _: kind((*FILES, 9)), BEGINNING, states, windows=1)  # noqa: B023


def test_a_state_that_was_read_past_is_not_saved() -> None:
    """A smaller window leaves some of the samples that were compared after the first resume unread."""
    whole = reference(Stateful(), 1)
    _, place, states = run_resumably(plan_for(24, 1, "train.epochs=2", "schedule=constant", samples=None),
                                     lambda _: Stateful(), windows=2)  # fmt: skip
    small = plan_for(2, 1, "train.epochs=2", "schedule=constant", "batch.global_size=2", samples=None)
    _, place, states = run_resumably(small, lambda _: Stateful(), place, states, windows=1)
    assert states == [{}]
    assert whole


class OfWorker(Stream):
    """Its order depends on the loader process that reads it, as that of Hugging Face's shuffle buffers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length) if get_worker_info() is None else reversed(range(self.length)))


def test_the_order_does_not_depend_on_loader_processes() -> None:
    options = ("train.epochs=1", "schedule=constant")
    orders = [
        read(plan_for(4, 2, *options, f"train.loader_workers={workers}", samples=None), OfWorker(40))
        for workers in (0, 1)
    ]
    assert orders[0] == orders[1] == [list(range(24)), list(range(24, 40))]


def test_ranks_without_a_sample_run_stand_ins() -> None:
    """A rank whose shards are empty from the beginning, and one that resumes when its shards are over."""
    for files in ((5, 0, 9, 0), (0, 0, 1, 0), (30, 0, 0, 0)):
        for ranks in (2, 4, 3):
            assert read(plan_of(4, ranks), Files(files)) == reference(Files(files), 4)
    with pytest.raises(DataError, match="it is empty"):
        read(plan_of(4, 2), Files((0, 0, 0, 0)))


def planned(shards: int | str, stream: StreamInfo | None, *options: str, samples: int | None = None) -> RunPlan:
    plan = make_plan("batch.global_size=24", "schedule=constant", samples=samples)
    task = dataclasses.replace(plan.task, stream=stream)
    return make_plan("batch.global_size=24", "schedule=constant", f"train.data_shards={shards}", *options, task=task)


def test_the_number_of_shards() -> None:
    automatic = StreamInfo(shards=16, automatic=True)
    assert planned("null", automatic).train.data_shards == 8
    assert planned("null", automatic, "batch.ramp=[[3,12]]", "batch.micro_size=2").train.data_shards == 4
    assert planned("null", StreamInfo(shards=1000, automatic=True), "batch.global_size=1000").train.data_shards == 50
    assert planned("null", StreamInfo(shards=16)).train.data_shards == 1
    assert planned("null", None).train.data_shards == planned(1, None, samples=100).train.data_shards == 1
    assert planned(6, StreamInfo(shards=16)).train.data_shards == 6
    assert planned(6, None).train.data_shards == 6, "a loop of one's own: the feed checks the rest"


@pytest.mark.parametrize(("shards", "stream", "options", "message"), [
    (5, StreamInfo(shards=16), (), r"data_shards=5: must divide batch.global_size, .*\n.*choices: 3 or 4 or 6;"),
    (8, StreamInfo(shards=16), ("batch.ramp=[[3,12]]", "batch.micro_size=2"), r"size of batch.ramp.*\n.*4 or 6 or 12"),
    (8, StreamInfo(shards=6), (), r"data_shards=8: the stream has 6 shards"),
    (2, StreamInfo(problem="no shards."), (), r"data_shards=2: no shards."),
    (0, None, (), r"must be at least 1"),
])  # fmt: skip
def test_numbers_that_are_refused(shards: int, stream: Any, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(shards, stream, *options)


def test_data_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides streams only"):
        planned(2, None, samples=100)

    class RanksOwn(Files):
        sharded = True

    for stream, message in (
        (Stream(30), "no method shard"), (RanksOwn(), "sharded = True"), (Files((9, 9)), "has 2 shards"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            open_feed(stream, plan_of(4, 1), World(0, 1, 0), CPU)


def test_a_stream_of_the_users_own_is_divided_only_if_they_say_so() -> None:
    assert stream_info(Files()) == StreamInfo(shards=8)
    assert stream_info(Stream(3)).shards == 0


def test_the_shards_of_a_wrapped_stream_are_not_those_of_its_wrapper() -> None:
    class Passing(IterableDataset[Any]):
        def __init__(self) -> None:
            self._inner = Files()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_inner"], name)

        def __iter__(self) -> Iterator[Any]:
            return (sample for sample in self._inner if sample % 5)

    class Changed(Files):
        def __iter__(self) -> Iterator[Any]:
            return (sample for sample in super().__iter__() if sample % 5)

        def __copy__(self) -> Files:
            return Files()

    for stream in (Passing(), Changed()):
        assert stream_info(stream).shards == own_shards(stream) == 0
        with pytest.raises(ConfigError, match="has no method shard"):
            open_feed(stream, plan_of(4, 1), World(0, 1, 0), CPU)


def test_the_plan_says_who_reads_what() -> None:
    info = StreamInfo(shards=8)
    assert data_shards_text(planned(6, info, "cluster.workers_per_node=1")) == "a stream of 6 shards"
    text = data_shards_text(planned(6, info, "cluster.workers_per_node=2"))
    assert text == "a stream of 6 shards, each rank reads its own"
    text = data_shards_text(planned(6, info, "cluster.workers_per_node=4", "batch.micro_size=1"))
    assert "every rank reads all" in text
    assert "train.data_shards a multiple of 4" in text
    assert "train.data_shards" in data_shards_text(planned(1, info, "cluster.workers_per_node=2"))


def test_a_resume_keeps_the_number() -> None:
    before, after = planned(6, StreamInfo(shards=8)), planned(4, StreamInfo(shards=8))
    require_same_run(Path("step_000003"), origin_of(before), 3, before)
    with pytest.raises(WrongCheckpoint, match=r"train.data_shards=4 \(was 6\): it is the order of the samples"):
        require_same_run(Path("step_000003"), origin_of(before), 3, after)


@pytest.mark.parametrize("buffer", [2, 3])
def test_samples_in_a_shuffle_buffer_are_not_lost_on_a_resume(buffer: int) -> None:
    """Outlines of the samples that follow may agree by chance with those at another position of a small buffer."""
    import datasets

    whole = datasets.Dataset.from_dict({"x": list(range(48))})
    for seed in range(12):
        make = functools.partial(whole.to_iterable_dataset(num_shards=4).shuffle, seed=seed, buffer_size=buffer)
        run = functools.partial(run_resumably, plan_of(4, 1), lambda _, make=make: make(), collate=numbers_of)
        _, place, states = run(windows=2)
        assert run(place, states)[0] == run()[0][2:]


def numbers_of(rows: list[Any]) -> Any:
    return torch.tensor([row["x"] for row in rows])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("shards", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_streams_of_hugging_face(shuffled: bool, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets.distributed

    whole = datasets.Dataset.from_dict({"x": list(range(120))})

    def make(rank: int = 0) -> Any:  # noqa: ARG001
        stream = whole.to_iterable_dataset(num_shards=8).filter(lambda row: row["x"] % 10 < 9)
        stream = stream.map(lambda row: READS.append(row["x"]) or {"x": row["x"]}).with_format("torch")
        return stream.shuffle(seed=1, buffer_size=4) if shuffled else stream

    def collate(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows])

    assert stream_info(make()) == StreamInfo(shards=8)
    assert stream_info(whole.to_iterable_dataset(num_shards=8).shuffle()).automatic
    filtered = operator.methodcaller("filter", lambda _, number: number > 9, with_indices=True)
    for operation in (operator.methodcaller("skip", 3), operator.methodcaller("take", 9), filtered):
        assert stream_info(operation(make())).problem
    assert stream_info(datasets.interleave_datasets([make(), make()])).problem
    assert stream_info(datasets.distributed.split_dataset_by_node(make(), 0, 2)).problem
    assert not stream_info(make().map(lambda rows: rows, batched=True)).automatic
    assert stream_info(make().map(lambda rows: rows, batched=True, drop_last_batch=True)).problem
    kept = whole.to_iterable_dataset(num_shards=8).select_columns(["x"]).shuffle(seed=1, buffer_size=4)
    assert stream_info(kept.with_format("torch")) == StreamInfo(shards=8, automatic=True)
    assert stream_info(datasets.concatenate_datasets([make(), make()])) == StreamInfo(shards=16)

    expected: list[list[int]] = []
    for epoch in range(2):
        parts = [make().shard(shards, index) for index in range(shards)]
        for part in parts:
            part.set_epoch(epoch)
        rows = [[int(row["x"]) for row in part] for part in parts]
        size, longest = 24 // shards, 108 // shards
        expected += [sorted(x for part in rows for x in part[at : at + size]) for at in range(0, longest, size)]
    for ranks, workers in ((1, 0), (2, 1), (1, 2), (3, 1)):
        assert run_resumably(plan_of(shards, ranks, workers), make, collate=collate)[0] == expected
    _, place, states = run_resumably(plan_of(shards, 4), make, windows=2, collate=collate)
    for ranks in (2, 1, 3):
        READS.clear()
        assert run_resumably(plan_of(shards, ranks), make, place, states, collate=collate)[0] == expected[2:]
        again = len(READS) - (1 if shards % ranks == 0 else ranks) * (2 * 108 - 48)
        assert again <= 4 * ranks or shuffled


@pytest.mark.nightly  # needs torchdata, which the suite does not install
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state_works_like_a_data_loader() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    task: Any = type("Task", (), {"train_data": lambda self: loaders.StatefulDataLoader(Stateful(), batch_size=4)})()  # noqa: ARG005
    notes: list[str] = []
    data = train_data(task, 0, notes)
    assert isinstance(data, Stateful)
    assert "returned a StatefulDataLoader" in notes[0]
