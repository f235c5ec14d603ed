"""Division of a stream among the ranks: blocks of samples, and the rank's own ones collated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from launcher.plan.batch import Batch
from launcher.plan.windows import share_of_window
from launcher.train.data.loader import Collate
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.stream_state import StreamReader, StreamState, outlines_of


def is_sharded(stream: Any) -> bool:
    """Return whether the stream divides itself among the ranks."""
    return bool(getattr(stream, "sharded", False))


def start_epoch(stream: Any, epoch: int) -> None:
    """Call ``stream.set_epoch(epoch)`` if it has that method."""
    if callable(getattr(stream, "set_epoch", None)):
        stream.set_epoch(epoch)


class SampleBlock(NamedTuple):
    """The next ``size`` samples of a stream; ``own``: they belong to this rank. ``window``: index in the run."""

    size: int
    own: bool
    window: int = 0


def blocks_in_turn(size: int, world_size: int, rank: int) -> Iterator[SampleBlock]:
    """Yield blocks of equal size that belong to the ranks in turn."""
    for number in itertools.count():
        yield SampleBlock(size, number % world_size == rank)


def blocks_of_windows(batch: Batch, first: int, rank: int) -> Iterator[SampleBlock]:
    """Yield the micro-batches of all ranks in full windows, from window ``first`` of the run on."""
    for index in itertools.count(first):
        size, ranks = batch.global_size_at(index), range(batch.world_size)
        shares = [share_of_window(size, batch, each) for each in ranks]
        for number in range(batch.accumulation_at(index)):
            yield from (SampleBlock(len(shares[each][number]), each == rank, index) for each in ranks)


# marks, instead of a number of samples, a batch to be used as a stand-in: this rank's share has no more samples
OVER = -1
# marks, instead of a number of samples, the outlines of the stream's first samples, which are sent before all batches
OUTLINES = -2
# marks, instead of a number of samples, the stream's state before a window, which is sent before its first batch
STATE = -3


class Shard(IterableDataset[tuple[Any, int]]):
    """This rank's blocks of a stream, collated.

    Every rank reads the whole stream with the same random numbers, so that a stream that shuffles has the same order.

    Args:
        blocks: division of the stream. A block of size 0 of this rank is a stand-in, and counts 0 samples.
        skip: number of this rank's blocks to drop. If none is left after them, the last one is sent, marked OVER.
        outlined: send the outlines of the first samples first, marked OUTLINES; an empty list for a sharded stream.
        rank: this rank, if it sends the stream's state before each window but the first, marked STATE; a stream without
            a state sends none.
        restored: continue from this state, if the stream can, and the blocks from its window on.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        blocks: Iterator[SampleBlock],
        collate: Collate,
        seed: int,
        epoch: int,
        skip: int = 0,
        *,
        outlined: bool = False,
        rank: int | None = None,
        restored: tuple[StreamState, Iterator[SampleBlock]] | None = None,
    ) -> None:
        self._dataset, self._blocks, self._collate = dataset, blocks, collate
        self._reading, self._collating = SampleRandom(seed), SampleRandom(seed)
        self._epoch, self._skip, self._outlined = epoch, skip, outlined
        self._rank, self._restored = rank, restored

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        sharded = is_sharded(self._dataset)
        info = get_worker_info()
        assert info is None or info.num_workers == 1
        reader, blocks, skip, position = self._begin()
        blocks = (block for block in blocks if block.own) if sharded else blocks
        newest: list[Any] = []  # this rank's last block; before it has one, any rank's
        left_out, state = position > 0, None
        outlined, current = self._outlined, None
        for size, own, window in blocks:
            if window != current:
                sends = self._rank is not None and current is not None and not skip
                state = reader.state(window, self._rank if sharded else None, position) if sends else None
                current = window
            block = reader.read(size)
            if state is not None and not state.following:
                state = state._replace(following=outlines_of(block))
            if outlined:
                outlined = False
                yield [] if sharded else outlines_of(block), OUTLINES
            if size and not block:
                break
            newest = block if block and (own or not newest) else newest
            if own and skip:
                left_out, skip = True, skip - 1
            elif own:
                if state is not None and state.following:
                    yield state, STATE
                    state = None
                left_out = False
                yield self._collated(newest, position), len(block)
            position += len(block)
        if left_out and newest:
            yield self._collated(newest, position), OVER

    def _begin(self) -> tuple[StreamReader, Iterator[SampleBlock], int, int]:
        """Return (reader, blocks, own blocks to drop, samples before the first block)."""
        if self._restored is not None:
            state, blocks = self._restored
            if (reader := StreamReader.restored(self._dataset, self._reading, self._epoch, state)) is not None:
                return reader, blocks, 0, state.position
            self._reading.stream_state = None
            if self._rank == 0:
                print(
                    "The state of the stream in the checkpoint does not lead to the samples that followed it: a "
                    "shuffle buffer,\n  for example, is not part of it. The epoch so far is read again.",
                    flush=True,
                )
        return StreamReader(self._dataset, self._reading, self._epoch), self._blocks, self._skip, 0

    def _collated(self, samples: list[Any], position: int) -> Any:
        with self._collating.own():
            self._collating.seed(self._epoch, position)
            return self._collate(samples)
