"""Sources of windows for indexed data and for streams: they assign samples to micro-batches and windows.

Window w of an epoch holds the samples at positions [w*G, (w+1)*G) of the epoch's permutation, for every world size (G:
global batch).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from launcher.config.schema import Balance, OnOom, ShortWindow
from launcher.errors import ConfigError, DataError
from launcher.plan.batch import require_short_batches
from launcher.plan.data_shards import (
    START_AGAIN,
    Division,
    own_shards,
    require_divisible,
    require_second_epoch,
    stream_info,
)
from launcher.plan.run_plan import RunPlan
from launcher.plan.windows import Span, Windows, share_of_window
from launcher.quantities import count, first_names
from launcher.task import ReadyBatches, as_ready, dataset_of, is_mapped, is_ready
from launcher.train.data.fingerprint import Outline, require_same_data, require_same_stream
from launcher.train.data.length_balance import BalancedWindow, TokensOf, balanced, tokens_function
from launcher.train.data.loader import Collate, MicroBatch, prefetch, read_samples, read_tensors, reads_several
from launcher.train.data.randomness import SampleRandom, Seed
from launcher.train.data.ready_batches import BatchStream, require_usable, samples_in, the_batch
from launcher.train.data.sample_order import ArrangedData, SampleOrder, samples_per_epoch
from launcher.train.data.stream import (
    StreamCheckpoint,
    StreamShare,
    StreamState,
    blocks_of_windows,
    is_sharded,
    start_epoch,
)
from launcher.train.world import World

# windows whose division by length is kept: those that are read ahead
_WINDOWS_KEPT = 8
# samples that a message names
_SAMPLES_SHOWN = 16


@dataclass(frozen=True)
class WindowPosition:
    """Position of a window: ``index`` in the run, ``window`` in its epoch."""

    index: int = 0
    epoch: int = 0
    window: int = 0


BEGINNING = WindowPosition()


@dataclass(frozen=True)
class Window:
    """This rank's part of a window: ``count`` micro-batches. ``index`` is counted over the whole run.

    ``padding_fraction``: see ``BalancedWindow``; over all ranks. None without ``batch.balance``.
    """

    index: int
    epoch: int
    count: int
    micro_batches: Iterator[MicroBatch]
    padding_fraction: float | None = None


def open_feed(
    dataset: Any,
    plan: RunPlan,
    world: World,
    device: torch.device,
    collate: Collate | None = None,
    start: WindowPosition = BEGINNING,
    *,
    compare: bool = False,
    checkpoint: StreamCheckpoint | None = None,
) -> Feed:
    """Return the source of windows of ``dataset`` from ``start`` on.

    Without a saved state, the part of a stream before ``start`` is read and dropped, so a stream must repeat its
    samples in the same order.

    Args:
        dataset: map-style (``__len__``, ``__getitem__``), or iterable.
        collate: samples -> batch; default: torch's default_collate.
        compare: check that all ranks hold the same data; all ranks must call this function then.
        checkpoint: the stream's state, restored and to be saved.

    Raises:
        ConfigError: ``batch.balance=length``, and the dataset has no lengths; or the stream cannot be divided into
            ``train.data_shards``, or read ``train.epochs`` times.
        DataError: its length is not the plan's, or the data differs between ranks.
    """
    if isinstance(dataset, _BaseDataLoaderIter):
        raise DataError(
            f"The training data is a {type(dataset).__name__}, the iterator of a DataLoader: its batches would be "
            "stacked again, as samples.\n"
            "  Pass the DataLoader itself, or launcher.ReadyBatches(...) of batches that can be read again."
        )
    ready = as_ready(dataset) if is_ready(dataset) else None
    if compare:
        require_same_data({"The training data": dataset_of(dataset)}, plan, world, device)
    checkpoint = checkpoint or StreamCheckpoint()
    if ready is not None or plan.task.samples is None:
        info = stream_info(dataset)
        if plan.train.data_shards > 1:
            require_divisible(plan.train.data_shards, info)
        require_second_epoch(plan.train.epochs, info)
    if ready is not None:
        _require_length(ready.samples, plan, world)
        if collate is not None:
            raise DataError("collate is for samples, and the training data has batches.\n  Leave it out.")
        return _ready_feed(ready, plan, world, device, start, compare=compare, checkpoint=checkpoint)
    collate = collate or default_collate
    if plan.task.samples is None:
        return StreamFeed(
            dataset, plan, world, device, collate, start,
            compare=compare and world.size > 1, checkpoint=checkpoint,
        )  # fmt: skip
    _require_length(samples_per_epoch(dataset, plan.train.seed) if is_mapped(dataset) else None, plan, world)
    if plan.batch.balance is Balance.length and not (isinstance(dataset, ArrangedData) and dataset.lengths is not None):
        raise ConfigError(
            "batch.balance", "length", "the lengths of the samples are not known.",
            "Give engine.windows() a launcher.ArrangedData(dataset, lengths=...).",
        )  # fmt: skip
    return MapFeed(dataset, plan, world, device, collate, start.index)


def _require_length(samples: int | None, plan: RunPlan, world: World) -> None:
    if plan.task.samples not in (None, samples):
        length = "no length" if samples is None else f"{samples} samples"
        raise DataError(
            f"The training data has {length} on rank {world.rank}, and the plan was made for {plan.task.samples}.\n"
            "  The data must be the same on every host, and the same as when the plan was made. A loop of your own "
            "gives\n  the length to make_plan(samples=...); None if there is none."
        )


def _ready_feed(
    ready: ReadyBatches, plan: RunPlan, world: World, device: torch.device, start: WindowPosition,
    *, compare: bool, checkpoint: StreamCheckpoint,
) -> StreamFeed:  # fmt: skip
    """Return the feed of a stream whose samples are batches, read in this process."""
    require_usable(ready)
    micro_size, batch = plan.batch.micro_size, plan.batch.of_ready_batches(ready.size)
    require_short_batches(plan.epoch.short_window_policy)
    if batch.sites > 1:
        raise DataError(
            "The training data has ready batches, which cannot be divided among sites.\n  Give its dataset."
        )
    turn = (world.rank, world.size) if batch.even else (0, 1)
    train = dataclasses.replace(plan.train, loader_workers=0)  # a DataLoader starts processes of its own
    return StreamFeed(
        BatchStream(ready, plan.train.seed, *turn), dataclasses.replace(plan, batch=batch, train=train), world, device,
        the_batch, start, compare=compare and world.size > 1, checkpoint=checkpoint,
        samples_in=functools.partial(samples_in, size=ready.size, micro_size=micro_size),
    )  # fmt: skip


class MapFeed:
    """Windows of a dataset with a length. A window's samples are computed from its index, which is all that a resume
    needs."""

    def __init__(
        self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate, start: int
    ) -> None:
        assert plan.task.samples is not None
        self._plan, self._rank, self._start, self._site = plan, world.rank, start, world.site
        keep_short = plan.epoch.short_window_policy is ShortWindow.exact
        self._spans = Windows(plan.task.samples, plan.batch.of_all_sites, keep_short=keep_short)
        self._order = order = SampleOrder(dataset, plan.task.samples, plan.train.seed, shuffle=plan.train.shuffle)
        specs = itertools.chain.from_iterable(map(self._specs, self._indices()))
        plain, self._balanced = dataset, None
        if isinstance(dataset, ArrangedData):
            plain = dataset.dataset
            if plan.batch.balance is Balance.length:
                tokens_of = tokens_function(dataset.micro_batch_tokens, collate)
                balance = functools.partial(self._balance, dataset, order, tokens_of)
                self._balanced = functools.lru_cache(_WINDOWS_KEPT)(balance)
                if plan.batch.on_oom is OnOom.stop:  # otherwise it may have been halved
                    _require_bound(dataset, plan.batch.micro_tokens, tokens_of)
        self._source = prefetch(
            _Ordered(plain, collate, plan.train.seed, order), plan, device, plan.train.seed, order=specs
        )

    def _indices(self) -> Iterable[int]:
        epochs = self._plan.train.epochs
        return itertools.count(self._start) if epochs is None else range(self._start, self._spans.before(epochs))

    def _span(self, index: int) -> Span:
        """Return the position of this site's part of a window."""
        span, sites = self._spans.at(index), self._plan.batch.sites
        size = span.size // sites
        return span._replace(first=span.first + self._site * size, size=size)

    def _specs(self, index: int) -> Iterator[_Spec]:
        """Yield this rank's micro-batches of a window."""
        span = self._span(index)
        if self._balanced is None:
            shares, stand_in = share_of_window(span.size, self._plan.batch, self._rank), 0
        else:
            window = self._balanced(index)
            shares, stand_in = window.offsets[self._rank], window.stand_in
        for offsets in shares:
            # without samples of its own, a rank reads the stand-in and counts none
            yield _Spec(span.epoch, span.first, span.size, offsets or [stand_in], len(offsets))

    def _balance(self, dataset: ArrangedData, order: SampleOrder, tokens_of: TokensOf, index: int) -> BalancedWindow:
        assert dataset.lengths is not None
        span = self._span(index)
        indices = order.take(span.epoch, span.first, span.size)
        return balanced(dataset.lengths[list(indices)].tolist(), self._plan.batch, tokens_of)

    def windows(self) -> Iterator[Window]:
        unit = self._plan.batch.unit
        for index in self._indices():
            self._index = index
            span = self._span(index)
            count, padding = -(-span.size // unit), None
            if self._balanced is not None:
                window = self._balanced(index)
                count, padding = len(window.offsets[self._rank]), window.padding_fraction
            yield Window(index, span.epoch, count, itertools.islice(self._source, count), padding)

    def has_next(self) -> bool:
        """Return whether this rank has a sample for the window after the current one."""
        return True

    def advance(self, anyone_has_next: bool) -> WindowPosition:  # noqa: ARG002 (every rank can count)
        """Return the position of the next window. ``anyone_has_next``: the result of ``has_next`` on any rank."""
        following = self._spans.at(self._index + 1)
        return WindowPosition(self._index + 1, following.epoch, following.window)

    def samples_text(self, note: _Spec | None) -> str:
        """Return the names of the samples of the micro-batch with this note; empty if they are not known."""
        if note is None:
            return ""
        indices = self._order.take(note.epoch, note.first, note.size)
        return _samples_text([indices[offset] for offset in note.offsets])

    def close(self) -> None:
        self._source.close()


def _require_bound(data: ArrangedData, bound: int | None, tokens_of: TokensOf) -> None:
    """Raise ConfigError if a sample alone exceeds ``batch.micro_tokens``."""
    if bound is None or data.lengths is None or not len(data.lengths):
        return
    longest = int(data.lengths.argmax())
    length = float(data.lengths[longest])
    tokens = math.ceil(tokens_of([length]))
    if tokens > bound:
        raise ConfigError(
            "batch.micro_tokens", bound,
            f"a micro-batch of sample {longest} alone, whose length is {length:,.0f}, takes {tokens:,} tokens.",
            f"Use {tokens} or more, cut or leave out longer samples, or pack samples into shorter rows.",
        )  # fmt: skip


class _Spec(NamedTuple):
    """Position of a micro-batch: ``offsets`` of the window that holds positions [first, first + size) of an epoch.

    Args:
        samples: number that count: all, or none of a stand-in.
    """

    epoch: int
    first: int
    size: int
    offsets: Sequence[int]
    samples: int


def _samples_text(indices: Sequence[int]) -> str:
    return f"sample{'' if len(indices) == 1 else 's'} {first_names([*map(str, indices)], _SAMPLES_SHOWN)}"


class Samples(Dataset[tuple[Any, ...]]):
    """Samples of a dataset, read by index, each with random numbers of its own, and collated."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._random = SampleRandom(seed)
        of_torch = type(dataset) in (Subset, TensorDataset)
        self._one_by_one = not of_torch and not reads_several(dataset)
        self._reads_tensors = of_torch and collate is default_collate

    def batch(self, indices: Sequence[int], epoch: int, positions: Iterable[int]) -> Any:
        """Return the batch of the samples ``indices``, whose random numbers depend on their positions in the epoch."""

        def read(seed: Seed | None) -> Any:
            if seed is None and self._one_by_one:
                return self._collate([self._dataset[index] for index in indices])
            if seed is None:
                return self._collate(read_samples(self._dataset, indices))
            samples: list[Any] = []
            for index, position in zip(indices, positions, strict=True):
                seed(epoch, position)
                samples.append(self._dataset[index])
            return self._collate(samples)

        try:
            if self._reads_tensors and (rows := read_tensors(self._dataset, indices)) is not None:
                return rows  # torch alone has run, which draws nothing
            return self._random.read(read)
        except Exception as error:
            error.add_note(f"In a micro-batch of {_samples_text(indices)} of the dataset.")
            raise


class _Ordered(Samples):
    """Dataset of collated micro-batches. The order is computed where the samples are read, in a loader process, so that
    it does not delay the step."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, order: SampleOrder) -> None:
        super().__init__(dataset, collate, seed)
        self._order = order

    def __getitem__(self, spec: _Spec) -> tuple[Any, int, _Spec]:
        indices = self._order.take(spec.epoch, spec.first, spec.size)
        positions = map(spec.first.__add__, spec.offsets)
        return self.batch([*map(indices.__getitem__, spec.offsets)], spec.epoch, positions), spec.samples, spec


class StreamFeed:
    """Windows of an iterable dataset, whose end is not known in advance.

    A window holds the next global batch of the stream, or of its shards in turn. A dataset that shards itself has an
    attribute ``sharded = True``; one that shuffles must do so in the same way on every rank. A rank whose share has
    ended runs stand-ins with weight zero until all shares have ended.
    """

    def __init__(
        self, dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate, start: WindowPosition,
        *, checkpoint: StreamCheckpoint, compare: bool = False, samples_in: Callable[[Any], int] | None = None,
    ) -> None:  # fmt: skip
        self._dataset, self._plan, self._world, self._device, self._collate = dataset, plan, world, device, collate
        self._position, self._compare, self._samples_in = start, compare, samples_in
        self._division = Division.of(plan)
        self._saves = world.rank == 0 or self._division.ranks > 1 or is_sharded(dataset)
        self._checkpoint, shards = checkpoint, own_shards(dataset) if self._division.shards > 1 else 0
        checkpoint.follow(self._state, shards, within_epoch=start.window > 0)
        self._open()

    def _open(self) -> None:
        start_epoch(self._dataset, self._position.epoch)
        batch, seed, division, rank = self._plan.batch, self._plan.train.seed, self._division, self._world.rank
        index, past = self._position.index, self._position.window
        shards = division.shards_of_rank(rank)
        restored = self._checkpoint.restored(index, rank, shards) if past else None
        if past and restored is None and rank == 0:
            windows = count(past, "window")
            print(f"Without a saved state of the stream, the {windows} of the epoch so far are read again.", flush=True)
        share = StreamShare(
            self._dataset, blocks_of_windows(batch, rank, division), self._collate, seed, self._position.epoch,
            division=division, rank=rank, first=index - past, start=index,
            saves=self._saves, outlined=self._compare, restored=restored,
        )  # fmt: skip
        self._ahead: list[MicroBatch] = []  # received and not used
        self._stand_in: MicroBatch | None = None
        self._outlines: list[Any] = []
        self._source = prefetch(share, self._plan, self._device, seed, readers=division.processes)
        self._receive()
        if self._compare:
            self._compare = False
            require_same_stream("The training data", [Outline(*each) for each in self._outlines], self._world)

    def _receive(self) -> bool:
        """Wait for the next micro-batch; return False at the end."""
        for item in self._source:
            self._outlines += item.note.outlines
            if self._samples_in is not None:
                data, known = item.data
                samples = item.samples and (known or self._samples_in(data))
                item = dataclasses.replace(item, data=data, samples=samples)
            if item.note.number is not None:
                self._ahead.append(item)
                return True
            self._stand_in = self._stand_in or MicroBatch(item.data, 0)
        return False

    def _state(self) -> list[StreamState] | None:
        """Return the states of this rank's shards before the next window; None if one is not known."""
        index, processes = self._position.index, self._division.processes
        if not self._position.window or not self._saves:
            return None
        # each process sends its states with its first micro-batch of the window
        while not self._ahead or self._ahead[-1].note[:2] < (index, processes - 1):
            if not self._receive():
                break
        states: dict[int, StreamState] = {}
        for _, number, of_process, _ in (item.note for item in self._ahead if item.note.window == index):
            if number < processes:
                if of_process is None:
                    return None
                states |= {state.shard: state for state in of_process}
        rank = self._world.rank if is_sharded(self._dataset) else None
        ended = StreamState(index, rank, 0, None, None, [], over=True)
        shards = self._division.shards_of_rank(self._world.rank)
        return [states.get(each, ended._replace(shard=each)) for each in shards]

    def windows(self) -> Iterator[Window]:
        while True:
            count = self._plan.batch.accumulation_at(self._position.index)
            yield Window(self._position.index, self._position.epoch, count, self._micro_batches(count))
            if not self._position.window:
                self._open()

    def _micro_batches(self, count: int) -> Iterator[MicroBatch]:
        for number in range(count):
            if self._ahead and self._ahead[0].note[:2] == (self._position.index, number):
                current = self._ahead.pop(0)
                self._stand_in = MicroBatch(current.data, 0)
                if not self._ahead:
                    self._receive()
                yield current
            elif self._stand_in is not None:
                yield self._stand_in
            else:
                raise self._no_sample()

    def _no_sample(self) -> DataError:
        start = f"Rank {self._world.rank} got no sample from the stream"
        if epoch := self._position.epoch:
            return DataError(
                f"{start} in epoch {epoch + 1}, after {count(epoch, 'epoch')} with samples: it seems to be read from "
                f"an iterator, which can be read only once.\n  {START_AGAIN}, or end the run with the samples of one "
                "epoch (train.epochs=1)."
            )
        return DataError(f"{start}: it is empty.\n  With `sharded = True` each rank needs samples of its own.")

    def has_next(self) -> bool:
        return bool(self._ahead)

    def advance(self, anyone_has_next: bool) -> WindowPosition:
        index, epoch, window = dataclasses.astuple(self._position)
        epoch, window = (epoch, window + 1) if anyone_has_next else (epoch + 1, 0)
        self._position = WindowPosition(index + 1, epoch, window)
        return self._position

    def samples_text(self, note: Any) -> str:  # noqa: ARG002 (a stream's samples have no numbers)
        return ""

    def close(self) -> None:
        self._source.close()
        if isinstance(self._dataset, BatchStream):
            self._dataset.close()


Feed = MapFeed | StreamFeed
