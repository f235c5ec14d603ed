"""Windows: their position in the data, the samples of each micro-batch, and conversion to a new batch size.

A run's position in its data is a window number. A global batch that changes during the run is therefore a ramp:
completed windows keep their sizes, and the position in the epoch is that of the next sample, whatever size follows.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from launcher.plan.batch import Batch, RampStage

# The first windows of a process are slower: memory is allocated, and DDP rebuilds its buckets in the second one.
# Medians leave them out.
WARM_UP_WINDOWS = 2
# samples of data that is not known yet: enough for every window
ANY_NUMBER = 2**62


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """Shards of a stream, and whether it has a second epoch.

    Attributes:
        shards: its own number of them; 0 if it cannot be divided.
        automatic: it is known that a division keeps all samples.
        problem: reason why it must not be divided, also if the user asks for it.
        single_pass: it is an iterator, such as a generator, which is empty after one epoch.
        ready: its elements are batches, see ``launcher.ReadyBatches``.
        batch_size: samples of a ready batch; None if that is not known.
    """

    shards: int = 0
    automatic: bool = False
    problem: str = ""
    single_pass: bool = False
    ready: bool = False
    batch_size: int | None = None


class Span(NamedTuple):
    """Position of a window: number ``window`` of its epoch, at positions [first, first + size) of that epoch."""

    epoch: int
    window: int
    first: int
    size: int


class Windows:
    """Mapping from window number to position in the data; independent of the world size.

    Args:
        samples: samples per epoch, at least as many as any full window has.
        batch: global batch, and the ramp up to it.
        keep_short: whether remaining samples at an epoch's end form a short window or are dropped.
    """

    def __init__(self, samples: int, batch: Batch, *, keep_short: bool) -> None:
        self._samples, self._size = samples, batch.global_size
        self._keep_short = keep_short
        self._per_epoch, _ = count_windows(samples, batch.global_size, keep_short=keep_short)
        # the first window of each stretch of equal size. A ramp may end inside an epoch: stretches go to that epoch's
        # end, after which epochs repeat
        self._begins: list[int] = []
        self._stretches: list[Span] = []
        self._index, at = 0, Span(0, 0, 0, 0)
        for stage in batch.ramp:
            at = self._append_windows(at, stage.windows, stage.global_size)
        while at.first:
            at = self._append_windows(at, self._per_epoch, batch.global_size, only=at.epoch)
        self._regular_from, self._regular_epoch = self._index, at.epoch

    def _append_windows(self, at: Span, steps: int, size: int, only: int | None = None) -> Span:
        """Record up to ``steps`` windows of ``size`` from ``at``, within epoch ``only`` if given; return the end."""
        while steps and (only is None or at.epoch == only):
            rest = self._samples - at.first
            count = min(steps, rest // size)
            if count:
                self._append_stretch(at._replace(size=size), count)
                steps -= count
                at = at._replace(window=at.window + count, first=at.first + count * size)
            elif rest and self._keep_short:
                self._append_stretch(at._replace(size=rest), 1)
                steps -= 1
                at = Span(at.epoch + 1, 0, 0, 0)
            else:
                at = Span(at.epoch + 1, 0, 0, 0)
        return Span(at.epoch + 1, 0, 0, 0) if at.first == self._samples else at

    def _append_stretch(self, at: Span, count: int) -> None:
        self._begins.append(self._index)
        self._stretches.append(at)
        self._index += count

    def at(self, index: int) -> Span:
        """Return the position of window ``index`` (from 0) of the run."""
        if index >= self._regular_from:
            epochs, window = divmod(index - self._regular_from, self._per_epoch)
            first = window * self._size
            return Span(self._regular_epoch + epochs, window, first, min(self._size, self._samples - first))
        number = bisect.bisect_right(self._begins, index) - 1
        ahead, begin = index - self._begins[number], self._stretches[number]
        return begin._replace(window=begin.window + ahead, first=begin.first + ahead * begin.size)

    def sizes(self, steps: int) -> set[int]:
        """Return the numbers of samples of the run's first ``steps`` windows."""
        sizes = {at.size for begin, at in zip(self._begins, self._stretches, strict=True) if begin < steps}
        for index in (self._regular_from, self._regular_from + self._per_epoch - 1):
            sizes |= {self.at(index).size} if index < steps else set()
        return sizes

    def before(self, epoch: int) -> int:
        """Return the number of windows before an epoch."""
        if epoch >= self._regular_epoch:
            return self._regular_from + (epoch - self._regular_epoch) * self._per_epoch
        return next(begin for begin, at in zip(self._begins, self._stretches, strict=True) if at.epoch >= epoch)


def count_windows(samples: int, global_size: int, *, keep_short: bool) -> tuple[int, int]:
    """Return (windows per epoch, samples of its short last window); 0 samples: the last one is full, or dropped."""
    full, rest = divmod(samples, global_size)
    return (full + 1, rest) if rest and keep_short else (full, 0)


def least_share(samples: int, batch: Batch) -> int:
    """Return the samples of the smallest micro-batch in a window of ``samples``, see ``share_of_window``."""
    return samples // (-(-samples // batch.unit) * batch.world_size)


def share_of_window(samples: int, batch: Batch, rank: int) -> list[range]:
    """Return the micro-batches of ``rank`` in a window of ``samples``, as ranges of offsets into the window.

    Every rank gets the same number of micro-batches, as few as can hold the window; their sizes differ by at most one
    sample. An empty range is a micro-batch of weight zero, which the rank still runs because the others wait for it.
    In a full window the n-th micro-batches of all ranks are adjacent.
    """
    count = -(-samples // batch.unit)
    base, extra = divmod(samples, count * batch.world_size)
    shares: list[range] = []
    for n in range(count):
        slot = n * batch.world_size + rank
        start = slot * base + min(slot, extra)
        shares.append(range(start, start + base + (slot < extra)))
    return shares


def past(batch: Batch, index: int) -> tuple[RampStage, ...]:
    """Return the sizes of the windows before ``index`` as stretches; equal for batches that agree on each window."""
    return _merged(_cut([*batch.ramp, RampStage(windows=index, global_size=batch.global_size)], 0, index))


def future(batch: Batch, index: int) -> tuple[tuple[RampStage, ...], int]:
    """Return the sizes from window ``index`` on: stretches, and the size after them."""
    stages = list(_merged(_cut(batch.ramp, index, None)))
    while stages and stages[-1].global_size == batch.global_size:
        stages.pop()
    return tuple(stages), batch.global_size


def changed_at(old: Batch, new: Batch, index: int) -> Batch:
    """Return ``new`` for a run whose windows before ``index`` were those of ``old``."""
    stages, size = future(new, index)
    before = past(old, index)
    ramp = _merged([*before, *stages])
    if not stages and before and before[-1].global_size == size:
        ramp = ramp[:-1]
    return dataclasses.replace(new, ramp=ramp)


def _cut(stages: Iterable[RampStage], first: int, stop: int | None) -> list[RampStage]:
    """Return the part of ``stages`` within [first, stop)."""
    stages_left: list[RampStage] = []
    begin = 0
    for stage in stages:
        end = begin + stage.windows
        windows = (end if stop is None else min(end, stop)) - max(begin, first)
        if windows > 0:
            stages_left.append(dataclasses.replace(stage, windows=windows))
        begin = end
    return stages_left


def _merged(stages: Iterable[RampStage]) -> tuple[RampStage, ...]:
    merged: list[RampStage] = []
    for stage in stages:
        if merged and merged[-1].global_size == stage.global_size:
            merged[-1] = dataclasses.replace(stage, windows=merged[-1].windows + stage.windows)
        else:
            merged.append(stage)
    return tuple(merged)
