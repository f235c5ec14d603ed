"""Which samples go into which micro-batch of which window, and how they get there before the step asks for them.

Window w of an epoch holds the samples at positions [w*G, (w+1)*G) of the epoch's permutation, whatever the world.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from launcher.config import ShortWindow
from launcher.errors import DataError
from launcher.plan import RunPlan
from launcher.train.feed import BEGINNING, Collate, Feed, Place, Window
from launcher.train.fingerprint import require_same_data
from launcher.train.loader import prefetch
from launcher.train.randomness import SampleRandom, Seed
from launcher.train.sampling import Permutation
from launcher.train.stream import StreamFeed
from launcher.train.task import is_loader
from launcher.train.world import World
from launcher.windows import Windows, share_of_window

PLACES_AHEAD = 4096


def open_feed(
    dataset: Any,
    plan: RunPlan,
    world: World,
    device: torch.device,
    collate: Collate | None = None,
    start: Place = BEGINNING,
    *,
    compare: bool = False,
) -> Feed:
    """The windows of ``dataset``, from ``start`` on. Of a stream, what lies before is read and left out: it must come
    again as it came before.

    Args:
        dataset: map-style (``__len__``, ``__getitem__``), or iterable.
        collate: samples -> batch; default: torch's default_collate.
        compare: whether the ranks make sure that they hold the same data. All ranks call this together then.

    Raises:
        DataError: the dataset's length is not the plan's, or the data differs between ranks.
    """
    if is_loader(dataset):
        raise DataError(
            f"The training data is a {type(dataset).__name__}: the engine makes up micro-batches of samples itself.\n"
            "  Give its dataset to engine.windows(), and its collate_fn as collate."
        )
    collate = collate or default_collate
    if compare:
        require_same_data({"The training data": dataset}, plan, world, device)
    if plan.task.samples is None:
        return StreamFeed(dataset, plan, world, device, collate, start, compare=compare and world.size > 1)
    if not isinstance(dataset, Sized) or len(dataset) != plan.task.samples:
        found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
        raise DataError(
            f"The training data has {found} on rank {world.rank}, and the plan was made for {plan.task.samples}.\n"
            "  The data must be the same on every host, and the same as when the plan was made."
        )
    return MapFeed(dataset, plan, world, device, collate, start.index)


class MapFeed:
    """Windows over a dataset with a length. Membership of a window is arithmetic, so a resume needs one integer."""

    def __init__(
        self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate, start: int
    ) -> None:
        assert plan.task.samples is not None
        self._plan, self._rank, self._start = plan, world.rank, start
        keep_short = plan.epoch.short_window_policy is ShortWindow.exact
        self._spans = Windows(plan.task.samples, plan.batch, keep_short=keep_short)
        specs = itertools.chain.from_iterable(map(self._specs, self._indices()))
        shuffled = _Shuffled(dataset, plan.train.seed, collate)
        self._source = prefetch(shuffled, plan, device, plan.train.seed, order=specs)

    def _indices(self) -> Iterable[int]:
        epochs = self._plan.train.epochs
        return itertools.count(self._start) if epochs is None else range(self._start, self._spans.before(epochs))

    def _specs(self, index: int) -> Iterator[_Spec]:
        """This rank's micro-batches of a window."""
        span = self._spans.at(index)
        for offsets in share_of_window(span.size, self._plan.batch, self._rank):
            yield _Spec(span.epoch, span.first, span.size, offsets.start, offsets.stop)

    def windows(self) -> Iterator[Window]:
        unit = self._plan.batch.micro_size * self._plan.batch.world_size
        for index in self._indices():
            self._index = index
            span = self._spans.at(index)
            count = -(-span.size // unit)
            yield Window(index, span.epoch, count, itertools.islice(self._source, count))

    def has_next(self) -> bool:
        return True

    def settle(self, anyone_has_next: bool) -> Place:  # noqa: ARG002 (every rank can count, and needs nobody's word)
        following = self._spans.at(self._index + 1)
        return Place(self._index + 1, following.epoch, following.window)

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
        self._random = SampleRandom(seed)
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

        def read(seed: Seed | None) -> Any:
            samples: list[Any] = []
            for position, index in enumerate(mine, spec.first + spec.start):
                if seed is not None:
                    seed(spec.epoch, position)
                samples.append(self._dataset[index])
            return self._collate(samples)

        return self._random.around(read), spec.stop - spec.start
