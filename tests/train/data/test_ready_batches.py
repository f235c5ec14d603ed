"""Ready batches: windows are those of a plain loop over the same loader, in every world and after every resume."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from launcher import ReadyBatches
from launcher.errors import ConfigError, DataError
from launcher.plan.run_plan import RunPlan
from launcher.task import dataset_of
from launcher.train.data.loader import copied
from launcher.train.data.ready_batches import BatchStream
from launcher.train.data.window_feed import open_feed
from launcher.train.world import World
from tests.helpers import torchrun
from tests.train.data.feeds import CPU, plan_for, run_resumably

SAMPLES = 103


class Numbers(Dataset[Tensor]):
    """``draws``: each sample has a random part, of the generator of the process that reads it."""

    def __init__(self, *, draws: bool = False) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index + (torch.rand(()).item() if self.draws else 0.0), dtype=torch.float64)


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        numbers = range(SAMPLES) if info is None else range(info.id, SAMPLES, info.num_workers)
        return (torch.tensor(float(number)) for number in numbers)


class Drawing(Sampler[int]):
    """Sampler with a state that no checkpoint has: each epoch continues from the one before."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class OfEpoch(Drawing):
    def set_epoch(self, epoch: int) -> None:
        self.random = random.Random(epoch)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted() -> Any:
    return WeightedRandomSampler([1.0 + n % 3 for n in range(SAMPLES)], SAMPLES, generator=seeded())


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), 4),
    "full batches": lambda: DataLoader(Numbers(), 4, drop_last=True),
    "generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=seeded()),
    "sampler": lambda: DataLoader(Numbers(), 4, sampler=Drawing(), generator=seeded()),
    "epochs of a sampler": lambda: DataLoader(Numbers(), 4, sampler=OfEpoch()),
    "weights": lambda: DataLoader(Numbers(), 4, sampler=weighted()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Drawing(), 4, drop_last=False)),
    "stream": lambda: DataLoader(Streamed(), 4),
    "processes": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=seeded(), num_workers=2),
    "persistent processes": lambda: DataLoader(
        Numbers(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "stream of processes": lambda: DataLoader(Streamed(), 4, num_workers=2),
}
# "slow" ones start processes for each rank
SLOW = ("processes", "persistent processes", "stream of processes")


def plan_of(ranks: int, *overrides: str, samples: int | None = None) -> RunPlan:
    uneven = () if 6 % ranks == 0 else ("batch.uneven=true",)
    return plan_for(
        4, ranks, "train.epochs=2", "train.steps=null", "schedule=constant", *uneven, *overrides, samples=samples
    )


def plain(loader: Any) -> list[list[float]]:
    """The samples of each window of two epochs in a plain loop, sorted."""
    windows: list[list[float]] = []
    for epoch in range(2):
        if isinstance(getattr(loader, "sampler", None), OfEpoch):
            loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        while window := list(itertools.islice(batches, 6)):
            windows.append(sorted(torch.cat(window).tolist()))
    return windows


@pytest.mark.parametrize("kind", LOADERS)
def test_windows_are_those_of_a_plain_loop(kind: str) -> None:
    make = LOADERS[kind]
    expected = plain(make())
    for ranks in (2,) if kind in SLOW else (1, 2, 4):
        assert run_resumably(plan_of(ranks), lambda _: make())[0] == expected
    first, second = (1, 2) if kind in SLOW else (4, 3)
    for windows in (2, 7):  # in the middle of the first epoch, and of the second one
        before, place, saved = run_resumably(plan_of(first), lambda _: make(), windows=windows)
        after = run_resumably(plan_of(second), lambda _: make(), place, saved)[0]
        assert before + after == expected


class Reused(IterableDataset[Tensor]):
    """Collate function and stream of ``size`` samples each, which writes all of its batches into the same memory."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size)

    def __call__(self, samples: list[Any]) -> Tensor:
        self.memory[: len(samples)] = samples
        return torch.from_numpy(self.memory)[: len(samples)]

    def __iter__(self) -> Iterator[Tensor]:
        size = len(self.memory)
        return (self([*range(first, min(SAMPLES, first + size))]) for first in range(0, SAMPLES, size))


@pytest.mark.parametrize("kind", ["loader", "iterable", "stream", "stream of batches", "samples", "indexed"])
def test_batches_in_reused_memory(kind: str) -> None:
    """The first window has the batches of a plain loop, which uses each before it reads the next."""
    make: Callable[[], Any] = {
        "loader": lambda: DataLoader(Numbers(), 4, collate_fn=Reused(4)),
        "iterable": lambda: ReadyBatches(Reused(4), 4),
        "stream": Streamed,
        "stream of batches": lambda: DataLoader(Reused(4), None),
        "samples": lambda: Reused(1),
        "indexed": Numbers,
    }[kind]
    plan = plan_for(
        1 if kind == "samples" else 4, 2, "train.shuffle=false", samples=SAMPLES if kind == "indexed" else None
    )
    collate = Reused(4) if kind in ("stream", "indexed") else None
    window = sorted(
        n
        for rank in range(2)
        for batch in next(open_feed(make(), plan, World(rank, 2, rank), CPU, collate).windows()).micro_batches
        for n in batch.data.flatten().tolist()
    )
    assert window == [*range(24)]


def test_copies_are_of_the_view_and_keep_the_graph() -> None:
    whole = torch.zeros(1000, requires_grad=True)
    view = copied({"a": whole[:4].detach(), "b": whole[:4]})
    assert view["a"].untyped_storage().nbytes() == 16
    assert view["b"].requires_grad


class Buckets(Sampler[list[int]]):
    """Batches of 2, 6 and again 2 and 6 samples."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4, 5, 6, 7], [8, 9], [*range(10, 16)]])


class Padded(Numbers):
    """Dataset whose items are batches: three rows, whatever the indices are."""

    def __getitem__(self, index: Any) -> Tensor:
        return padded([*map(torch.tensor, index)])


def padded(samples: list[Tensor]) -> Tensor:
    """Three time steps of each sample, as pad_sequence returns them."""
    return torch.stack(samples).expand(3, -1)


def sample_counts(data: Any, micro: int = 4, batches: int = 4) -> list[int]:
    feed = open_feed(data, plan_for(micro, 1, samples=None), World(0, 1, 0), CPU)
    counts = [batch.samples for batch in itertools.islice(next(feed.windows()).micro_batches, batches)]
    feed.close()
    return counts


def test_the_weight_of_a_batch_is_its_number_of_samples() -> None:
    data = Numbers()
    assert sample_counts(DataLoader(data, batch_sampler=Buckets())) == [2, 6, 2, 6]
    assert sample_counts(DataLoader(data, batch_sampler=Buckets(), collate_fn=padded)) == [2, 6, 2, 6]
    assert sample_counts(DataLoader(Streamed(), 4, collate_fn=padded)) == [4] * 4
    assert sample_counts(DataLoader(Padded(), None, sampler=BatchSampler(Drawing(), 4, False))) == [4] * 4
    assert sample_counts(ReadyBatches([torch.zeros(2), torch.zeros(3, 4)]), batches=2) == [2, 3]
    assert sample_counts(ReadyBatches([[1.0] * 4, [2.0] * 4]), batches=2) == [4, 4]


def test_a_shuffle_without_a_seed_is_that_of_the_run() -> None:
    """Also the random numbers that samples draw, here and in the loader's processes."""

    def make(_: int) -> Any:
        torch.seed()
        return DataLoader(Numbers(draws=True), 4, shuffle=True)

    whole, other = (run_resumably(plan_of(1, f"train.seed={seed}"), make)[0] for seed in range(2))
    assert whole != other
    assert whole[:5] != whole[5:]
    assert all(
        sorted(int(n) for window in epoch for n in window) == [*range(SAMPLES)] for epoch in (whole[:5], whole[5:])
    )
    _, place, saved = run_resumably(plan_of(2), make, windows=7)
    assert run_resumably(plan_of(3), make, place, saved)[0] == whole[7:]


def test_random_numbers_of_loader_processes_are_the_same_after_a_resume() -> None:
    def make(_: int) -> Any:
        return DataLoader(Numbers(draws=True), 4, shuffle=True, num_workers=2)

    whole = run_resumably(plan_of(1), make, windows=3)[0]
    _, place, saved = run_resumably(plan_of(1), make, windows=2)
    assert run_resumably(plan_of(1), make, place, saved, windows=1)[0] == whole[2:]


@pytest.mark.parametrize("samples", [None, SAMPLES])
def test_a_short_batch_counts_its_samples(samples: int | None) -> None:
    plan = plan_of(2, samples=samples)
    counts: list[list[int]] = [[], []]
    for rank in range(2):
        feed = open_feed(DataLoader(Numbers(), 4), plan, World(rank, 2, rank), CPU)
        for window in itertools.islice(feed.windows(), 5):
            counts[rank] += [batch.samples for batch in window.micro_batches]
            feed.advance(feed.has_next())
        feed.close()
    assert counts == [[4] * 13 + [0, 0], [4] * 12 + [3, 0, 0]]


class Stateful:
    """A loader with a state that holds a tensor, as those of torchdata do; ``read``: batches that were read."""

    read = 0

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < SAMPLES:
            first, self.position = self.position, min(SAMPLES, self.position + 4)
            Stateful.read += 1
            yield torch.arange(float(first), self.position)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": torch.tensor(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"].item()


def test_a_state_is_saved_and_nothing_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    def make(_: int) -> ReadyBatches:
        return ReadyBatches(Stateful(), 4)

    expected = plain(DataLoader(Numbers(), 4))
    _, place, saved = run_resumably(plan_of(2), make, windows=7)
    Stateful.read = 0
    assert run_resumably(plan_of(1), make, place, saved)[0] == expected[7:]
    assert Stateful.read == 26 - 12
    assert not capsys.readouterr().out


@pytest.mark.nightly  # needs torchdata, which the suite does not install
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_torchdata_is_saved(workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make(_: int = 0) -> Any:
        return loaders.StatefulDataLoader(Numbers(), 4, shuffle=True, generator=seeded(), num_workers=workers)

    expected = plain(make())
    for windows in (2, 7):
        before, place, saved = run_resumably(plan_of(2), make, windows=windows)
        rest = run_resumably(plan_of(1), make, place, saved)[0]
        # torchdata's own later epochs are others after its state was loaded in its own process
        compared = 5 if windows == 2 and not workers else None
        assert (before + rest)[:compared] == expected[:compared]
    assert not capsys.readouterr().out


def test_batches_of_each_rank() -> None:
    """Each rank has the samples that a DistributedSampler gives it; the sampler pads them with a repeated one."""

    def make(rank: int) -> ReadyBatches:
        sampler = DistributedSampler(cast("Any", Numbers()), 2, rank)
        return ReadyBatches(DataLoader(Numbers(), 4, sampler=sampler), sharded=True)

    expected: list[list[float]] = []
    for epoch in range(2):
        parts = [make(rank).batches for rank in range(2)]
        for part in parts:
            part.sampler.set_epoch(epoch)
        of_ranks = [iter(part) for part in parts]
        expected += [
            sorted(torch.cat([batch for each in of_ranks for batch in itertools.islice(each, 3)]).tolist())
            for _ in range(5)
        ]
    assert run_resumably(plan_of(2), make)[0] == expected
    _, place, saved = run_resumably(plan_of(2), make, windows=7)
    assert run_resumably(plan_of(2), make, place, saved)[0] == expected[7:]


def refusal(data: Any, plan: RunPlan, **options: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as raised:
        open_feed(data, plan, World(0, plan.batch.world_size, 0), CPU, **options)
    return str(raised.value)


def test_what_is_refused() -> None:
    plan, data = plan_of(2), cast("Any", Numbers())
    distributed = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))
    assert "a DistributedSampler that divides the samples among 2 processes" in refusal(distributed, plan)
    assert "batches of 8 samples" in refusal(DataLoader(data, 8), plan)
    assert "Use batch.micro_size=8" in refusal(DataLoader(data, 8), plan)
    assert "whole" in refusal(DataLoader(data, 4), plan_of(1, "batch.global_size=22", "batch.uneven=true"))
    assert "batch.on_oom" in refusal(DataLoader(data, 4), plan_of(2, "batch.on_oom=shrink"))
    assert "collate is for samples" in refusal(DataLoader(data, 4), plan, collate=list)
    assert "has 103 samples on rank 0, and the plan was made for 80" in refusal(
        DataLoader(data, 4), plan_of(2, samples=80)
    )
    assert "in_order=False" in refusal(DataLoader(data, 4, num_workers=2, in_order=False), plan)
    assert "its DataLoader decides" in refusal(
        DataLoader(data, 4), plan_of(2, "batch.short_window=drop", samples=SAMPLES)
    )
    assert dataset_of(ReadyBatches(DataLoader(data, 4), sharded=True)) is None, "ranks do not compare their own"
    assert "Pass the DataLoader itself" in refusal(iter(DataLoader(data, 4)), plan)
    assert "read only once" in refusal(ReadyBatches(iter([[1]])), plan)
    assert "train.data_shards=2: the training data has ready batches" in refusal(
        DataLoader(data, 4), plan_of(2, "train.data_shards=2")
    )


def test_generators_cannot_go_back() -> None:
    loader = LOADERS["generator"]()
    _, place, _ = run_resumably(plan_of(1), lambda _: loader, windows=7)
    assert "Build a new one" in refusal(loader, plan_of(1), start=place)


def test_an_unseeded_loader_is_read_again_by_another_call() -> None:
    for loader in (DataLoader(Numbers(), 4, shuffle=True), DataLoader(Streamed(), 4)):
        whole, place, _ = run_resumably(plan_of(1), lambda _, loader=loader: loader, windows=7)
        assert run_resumably(plan_of(1), lambda _, loader=loader: loader, windows=7)[0] == whole
        assert len(run_resumably(plan_of(1), lambda _, loader=loader: loader, place)[0]) == 3


class Restoring(DataLoader[Any]):
    """Loader whose state does not lead to its samples, and whose loading sets the generator, as torchdata's does."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state
        cast("torch.Generator", self.generator).manual_seed(99)


def test_an_epoch_is_read_again_in_the_same_order_after_a_failed_restore(capsys: pytest.CaptureFixture[str]) -> None:
    def make(_: int = 0) -> Any:
        return Restoring(cast("Any", Numbers()), 4, shuffle=True, generator=seeded())

    expected = plain(make())
    before, place, saved = run_resumably(plan_of(1), make, windows=7)
    assert before + run_resumably(plan_of(1), make, place, saved)[0] == expected
    assert "The epoch so far is read again" in capsys.readouterr().out


class DrawingStream(Streamed):
    def __iter__(self) -> Iterator[Tensor]:
        return (number + torch.rand(()) for number in super().__iter__())


def test_loader_processes_of_all_ranks_draw_the_same_where_all_are_read() -> None:
    """Also if the loader is persistent, and was read by its owner, whose processes stay."""
    loaders = [DataLoader(DrawingStream(), 4, num_workers=1, persistent_workers=True) for _ in range(2)]
    of_owner = [iter(loader) for loader in loaders]
    batches: list[Any] = []
    for rank, loader in enumerate(loaders):
        stream = BatchStream(ReadyBatches(loader), 0, rank, 2)
        stream.set_epoch(0)
        torch.manual_seed(4)
        batches.append(next(iter(stream)))
        stream.close()
    assert torch.equal(*(batch.sample for batch in batches))
    assert [len(next(each)) for each in of_owner] == [batch.samples for batch in batches]


def test_draws_of_earlier_epochs_keep_no_indices() -> None:
    stream = cast("Any", BatchStream(ReadyBatches(LOADERS["generator"]()), 0))
    stream.set_epoch(3)
    assert not stream._indices.taken


def test_samples_that_differ_between_reads_are_no_fault() -> None:
    """Ranks compare the indices that a sampler draws, and not what augmentation makes of them."""
    from launcher.train.data.stream import outlines_of

    class Noisy(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index, np.random.default_rng().random()])

    def outlines(loader: Any) -> list[Any]:
        return outlines_of(BatchStream(ReadyBatches(loader), 0))

    assert outlines(DataLoader(Noisy(), 4)) == outlines(DataLoader(Noisy(), 4))
    assert outlines(DataLoader(Noisy(), 4)) != outlines(DataLoader(Noisy(), 4, sampler=Drawing()))


def test_loader_processes_read_the_batches_of_their_rank() -> None:
    plan = plan_of(2)
    drawn: list[list[float]] = [[], []]
    for rank in range(2):
        loader = DataLoader(Numbers(draws=True), 4, num_workers=2)
        feed = open_feed(loader, plan, World(rank, 2, rank), CPU)
        drawn[rank] = [n for batch in next(feed.windows()).micro_batches for n in batch.data.tolist()]
        feed.close()
    assert [[int(n) // 4 for n in numbers[::4]] for numbers in drawn] == [[0, 2, 4], [1, 3, 5]]
    assert {n % 1 for n in drawn[0]}.isdisjoint(n % 1 for n in drawn[1]), "ranks draw other random numbers"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_steps_are_those_of_a_plain_loop(ranks: int, tmp_path: Path) -> None:
    printed = torchrun(
        Path(__file__).with_name("ready_batches_worker.py"), [str(tmp_path), "ddp", "fsdp"], ranks, tmp_path
    )
    results = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert "differs between ranks: sample 0 of the stream on rank 1" in results.pop("other seeds")
    assert len(results) == 4
    assert max(results.values()) < 1e-5, results
