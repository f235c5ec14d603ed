"""Which samples go into which micro-batch of which window, and how they get there before the step asks for them.

Window w of an epoch holds the samples at positions [w*G, (w+1)*G) of the epoch's permutation, whatever the world.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from launcher.batch import Batch, share_of_window
from launcher.errors import DataError
from launcher.plan import RunPlan
from launcher.process import STOP_SIGNALS
from launcher.train.sampling import Permutation
from launcher.train.world import World

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class MicroBatch:
    """``data``: collated, on the device. ``samples``: how many count; 0 in a stand-in that runs with weight zero
    because the other ranks have one more micro-batch than this rank has samples for."""

    data: Any
    samples: int


@dataclass(frozen=True)
class Window:
    """One optimizer step's share of this rank: ``count`` micro-batches. ``index``: counted over the whole run."""

    index: int
    epoch: int
    count: int
    micro_batches: Iterator[MicroBatch]


class Feed(Protocol):
    """A source of windows.

    ``has_next``: this rank has a sample for the window after the one under way. ``settle`` takes what all ranks have
    said of that, and answers whether the window was the last of the plan's epochs.
    """

    def windows(self) -> Iterator[Window]: ...
    def has_next(self) -> bool: ...
    def settle(self, anyone_has_next: bool) -> bool: ...
    def close(self) -> None: ...


def open_feed(
    dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate | None = None, start: int = 0
) -> Feed:
    """The windows of ``dataset`` from window ``start`` of the run on.

    Args:
        dataset: map-style (``__len__``, ``__getitem__``), or iterable.
        collate: samples -> batch; default: torch's default_collate.

    Raises:
        DataError: the dataset's length is not the plan's.
    """
    collate = collate or default_collate
    if plan.task.samples is None:
        return StreamFeed(dataset, plan, world, device, collate, start)
    if not isinstance(dataset, Sized) or len(dataset) != plan.task.samples:
        found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
        raise DataError(
            f"The training data has {found} on rank {world.rank}, and the plan was made for {plan.task.samples}.\n"
            "  The data must be the same on every host, and the same as when the plan was made."
        )
    return MapFeed(dataset, plan, world, device, collate, start)


class MapFeed:
    """Windows over a dataset with a length. Membership of a window is arithmetic, so a resume needs one integer."""

    def __init__(
        self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate, start: int
    ) -> None:
        assert plan.task.samples is not None
        assert plan.epoch.windows is not None
        self._plan, self._rank, self._start = plan, world.rank, start
        self._samples, self._windows = plan.task.samples, plan.epoch.windows
        specs = itertools.chain.from_iterable(map(self._specs, self._indices()))
        self._source = _prefetch(_Fetch(dataset, collate), plan, device, sampler=specs)

    def _indices(self) -> Iterable[int]:
        epochs = self._plan.train.epochs
        return itertools.count(self._start) if epochs is None else range(self._start, epochs * self._windows)

    def _size(self, index: int) -> int:
        """Samples in a window of the run, over all ranks."""
        first = index % self._windows * self._plan.batch.global_size
        return min(self._plan.batch.global_size, self._samples - first)

    def _specs(self, index: int) -> Iterator[tuple[list[int], int]]:
        """This rank's micro-batches of a window: (sample indices, how many count)."""
        epoch, window = divmod(index, self._windows)
        order = Permutation(self._samples, self._plan.train.seed, epoch)
        first = window * self._plan.batch.global_size
        for offsets in share_of_window(self._size(index), self._plan.batch, self._rank):
            indices = [order[first + offset] for offset in offsets or (0,)]
            yield indices, len(offsets)

    def windows(self) -> Iterator[Window]:
        unit = self._plan.batch.micro_size * self._plan.batch.world_size
        for index in self._indices():
            self._index = index
            count = -(-self._size(index) // unit)
            yield Window(index, index // self._windows, count, itertools.islice(self._source, count))

    def has_next(self) -> bool:
        return True

    def settle(self, anyone_has_next: bool) -> bool:  # noqa: ARG002 (every rank can count, and needs nobody's word)
        epochs = self._plan.train.epochs
        return epochs is not None and self._index + 1 >= epochs * self._windows

    def close(self) -> None:
        self._source.close()


class StreamFeed:
    """Windows over an iterable dataset, whose end no rank knows before it is there.

    Sample j of the stream belongs to block j // micro_size, and blocks go to the ranks in turn; a dataset that shards
    itself says so with an attribute ``sharded = True``. A rank whose share has ended runs weight zero until all have.
    """

    def __init__(
        self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate, start: int
    ) -> None:
        self._dataset, self._plan, self._world, self._device, self._collate = dataset, plan, world, device, collate
        self._index = start
        self._epoch = 0
        self._stand_in: MicroBatch | None = None
        self._more = True
        self._open()

    def _open(self) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._epoch)
        shard = _Shard(self._dataset, self._plan.batch, self._world.rank, self._collate)
        self._source = _prefetch(shard, self._plan, self._device)
        self._next = next(self._source, None)

    def windows(self) -> Iterator[Window]:
        count = self._plan.batch.accumulation
        while True:
            yield Window(self._index, self._epoch, count, self._micro_batches(count))
            self._index += 1
            if not self._more:
                self._epoch += 1
                self._open()

    def _micro_batches(self, count: int) -> Iterator[MicroBatch]:
        for _ in range(count):
            if self._next is not None:
                current, self._next = self._next, next(self._source, None)
                self._stand_in = MicroBatch(current.data, 0)
                yield current
            elif self._stand_in is not None:
                yield self._stand_in
            else:
                raise DataError(
                    f"Rank {self._world.rank} got no sample from the stream: it is empty, or has fewer blocks of "
                    f"batch.micro_size={self._plan.batch.micro_size} samples than there are ranks.\n"
                    "  Use fewer ranks or a smaller micro_size."
                )

    def has_next(self) -> bool:
        return self._next is not None

    def settle(self, anyone_has_next: bool) -> bool:
        self._more = anyone_has_next
        epochs = self._plan.train.epochs
        return not self._more and epochs is not None and self._epoch + 1 >= epochs

    def close(self) -> None:
        self._source.close()


def eval_batches(
    dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of ``dataset``, once, in micro-batches; the shares of all ranks are the whole."""
    collate = collate or default_collate
    size = plan.batch.micro_size
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return _prefetch(_Shard(dataset, plan.batch, world.rank, collate), plan, device)
    mine = range(world.rank, len(dataset), world.size)
    specs = [(list(mine[at : at + size]), len(mine[at : at + size])) for at in range(0, len(mine), size)]
    return _prefetch(_Fetch(dataset, collate), plan, device, sampler=specs)


class _Fetch(Dataset[tuple[Any, int]]):
    """Collates a micro-batch where the samples are read: in the loader's process."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, spec: tuple[list[int], int]) -> tuple[Any, int]:
        indices, samples = spec
        return self._collate([self._dataset[index] for index in indices]), samples


class _Shard(IterableDataset[tuple[Any, int]]):
    """This rank's blocks of a stream, collated."""

    def __init__(self, dataset: Iterable[Any], batch: Batch, rank: int, collate: Collate) -> None:
        self._dataset, self._batch, self._rank, self._collate = dataset, batch, rank, collate

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        whole = bool(getattr(self._dataset, "sharded", False))
        info = get_worker_info()
        assert info is None or info.num_workers == 1
        samples = iter(self._dataset)
        for number in itertools.count():
            block = list(itertools.islice(samples, self._batch.micro_size))
            if not block:
                return
            if whole or number % self._batch.world_size == self._rank:
                yield self._collate(block), len(block)


def _prefetch(
    source: Any, plan: RunPlan, device: torch.device, sampler: Iterable[Any] | None = None
) -> Generator[MicroBatch, None, None]:
    """Micro-batches from loader processes that stay two windows ahead of the step."""
    stream = sampler is None
    workers = min(1, plan.train.loader_workers) if stream else plan.train.loader_workers
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,
        sampler=sampler,  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        collate_fn=_as_is,
        prefetch_factor=max(2, -(-2 * plan.batch.accumulation // workers)) if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_outlive_stop_requests,
        # a generator of its own: reading data must not draw from the stream that dropout uses
        generator=torch.Generator().manual_seed(plan.train.seed),
    )
    for data, samples in loader:
        yield MicroBatch(to_device(data, device), samples)


def _outlive_stop_requests(worker: int) -> None:  # noqa: ARG001
    """In a loader process: a stop signal goes to the whole process group, and the last window still needs its data."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _as_is(item: Any) -> Any:
    return item


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``: tuples, lists, dicts and objects with ``to`` are looked into."""
    if device.type == "cpu":
        return value
    if isinstance(value, dict):
        return type(value)((k, to_device(v, device)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
