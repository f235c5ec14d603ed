"""Which samples go into which micro-batch of which window, and how they get there before the step asks for them.

Window w of an epoch holds the samples at positions [w*G, (w+1)*G) of the epoch's permutation, whatever the world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from launcher.batch import Batch, share_of_window
from launcher.errors import DataError
from launcher.plan import RunPlan
from launcher.train.loader import MicroBatch, prefetch
from launcher.train.sampling import Permutation
from launcher.train.world import World

Collate = Callable[[list[Any]], Any]
PLACES_AHEAD = 4096


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
    """The windows of ``dataset``, from window ``start`` of the run on; a stream begins at its beginning.

    Args:
        dataset: map-style (``__len__``, ``__getitem__``), or iterable.
        collate: samples -> batch; default: torch's default_collate.

    Raises:
        DataError: the dataset's length is not the plan's.
    """
    collate = collate or default_collate
    if plan.task.samples is None:
        return StreamFeed(dataset, plan, world, device, collate)
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
        # of each rank's own: two ranks must not augment their samples alike
        seed = plan.train.seed * plan.batch.world_size + world.rank
        self._source = prefetch(_Shuffled(dataset, plan.train.seed, collate), plan, device, seed, order=specs)

    def _indices(self) -> Iterable[int]:
        epochs = self._plan.train.epochs
        return itertools.count(self._start) if epochs is None else range(self._start, epochs * self._windows)

    def _size(self, index: int) -> int:
        """Samples in a window of the run, over all ranks."""
        first = index % self._windows * self._plan.batch.global_size
        return min(self._plan.batch.global_size, self._samples - first)

    def _specs(self, index: int) -> Iterator[_Spec]:
        """This rank's micro-batches of a window."""
        epoch, window = divmod(index, self._windows)
        first, size = window * self._plan.batch.global_size, self._size(index)
        for offsets in share_of_window(size, self._plan.batch, self._rank):
            yield _Spec(epoch, first, size, offsets.start, offsets.stop)

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
    itself says so with an attribute ``sharded = True``, and one that shuffles must do it alike on every rank. A rank
    whose share has ended runs weight zero until all have.
    """

    def __init__(self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate) -> None:
        self._dataset, self._plan, self._world, self._device, self._collate = dataset, plan, world, device, collate
        self._index = 0
        self._epoch = 0
        self._stand_in: MicroBatch | None = None
        self._more = True
        self._open()

    def _open(self) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self._epoch)
        shard = Shard(self._dataset, self._plan.batch, self._world.rank, self._collate)
        # the same on every rank: each reads the whole stream, and a shuffled one must come in one order
        self._source = prefetch(shard, self._plan, self._device, self._plan.train.seed + self._epoch)
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


class _Spec(NamedTuple):
    """A micro-batch by its place: offsets [start, stop) of the window that holds positions [first, first + size)."""

    epoch: int
    first: int
    size: int
    start: int
    stop: int


class _Shuffled(Dataset[tuple[Any, int]]):
    """Finds and collates a micro-batch where the samples are read: in the loader's process, off the step's path."""

    def __init__(self, dataset: Any, seed: int, collate: Collate) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._epoch, self._first, self._indices = -1, 0, list[int]()

    def _window(self, spec: _Spec) -> list[int]:
        """The window's samples. Micro-batches and windows follow each other, and many places cost little more to find
        than one, so a stretch of them is kept."""
        start = spec.first - self._first
        if spec.epoch != self._epoch or start < 0 or start + spec.size > len(self._indices):
            samples = len(self._dataset)
            ahead = min(max(spec.size, PLACES_AHEAD), samples - spec.first)
            self._indices = Permutation(samples, self._seed, spec.epoch).take(spec.first, ahead)
            self._epoch, self._first, start = spec.epoch, spec.first, 0
        return self._indices[start : start + spec.size]

    def __getitem__(self, spec: _Spec) -> tuple[Any, int]:
        indices = self._window(spec)
        # without a sample of its own, a rank runs its window's first one with weight zero
        mine = indices[spec.start : spec.stop] or indices[:1]
        return self._collate([self._dataset[index] for index in mine]), spec.stop - spec.start


class Shard(IterableDataset[tuple[Any, int]]):
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
