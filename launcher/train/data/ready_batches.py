"""Batches of a DataLoader or another iterable, used as micro-batches.

Batch k of an epoch belongs to rank k mod world size. Each rank reads all batches, except where a sampler draws the
indices and loader processes read them: then it reads its own only. Draws from the global generators follow from
train.seed and the epoch. Generators of the DataLoader and its samplers continue from epoch to epoch, as in a plain
loop; a resume first repeats the draws of the earlier epochs.
"""

from __future__ import annotations

import collections
import copy
import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from launcher.errors import DataError
from launcher.heartbeat import HEARTBEAT
from launcher.process import STOP_SIGNALS
from launcher.task import ReadyBatches, is_loader, seed_everything, seed_for
from launcher.train.data.loader import guard_loader_process
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.stream import Identified, has_state, start_epoch

# epochs for which the samplers and generators of a DataLoader were used in this process
_EPOCHS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def require_usable(ready: ReadyBatches) -> None:
    """Check that every rank reads the same batches in the same order.

    Raises:
        DataError: the sampler divides the samples among ranks, or batches arrive in any order.
    """
    loader = ready.batches
    for sampler in _samplers(loader) if not ready.sharded else ():
        if (parts := getattr(sampler, "num_replicas", getattr(sampler, "num_processes", 1))) > 1:
            raise DataError(
                f"The training data is a {type(loader).__name__} with a {type(sampler).__name__} that divides "
                f"the samples among {parts} processes: the engine deals its batches to the ranks, so they would be "
                "divided twice, and most of them never used.\n  Leave the sampler out (shuffle=True, or one of all "
                "samples); or give launcher.ReadyBatches(loader, sharded=True), whose ranks use all of their own."
            )
    if getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
        raise DataError(
            "The training data is a DataLoader with in_order=False: its batches come in another order on each rank, "
            "and after a resume.\n  Leave in_order out."
        )


def the_batch(samples: list[Any]) -> tuple[Any, int | None]:
    """Return the batch of a micro-batch, which is its only sample, and the number of samples in it if it is known."""
    (read,) = samples
    return read.sample, read.samples


def samples_in(batch: Any, size: int | None, micro_size: int) -> int:
    """Return the number of samples in a batch that no DataLoader collated: that of its tensors' rows if they agree, but
    at most ``size``; otherwise ``size``, or ``micro_size`` if there is none."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    rows = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(rows) != 1:
        return size or micro_size
    (found,) = rows
    return max(1, found if size is None else min(found, size))


class BatchStream(IterableDataset[Identified]):
    """Stream of ready batches. Its state is that of a DataLoader or iterable that has one.

    What ranks compare of a batch are the indices of its samples, if a sampler draws them: augmentation may give other
    values on each rank.

    Args:
        seed: train.seed.
        rank: rank of ``ranks`` that use a batch each in turn.
    """

    def __init__(self, ready: ReadyBatches, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._ready, self._seed, self._epoch, self._rank, self._ranks = ready, seed, 0, rank, ranks
        self._loader = is_loader(ready.batches)
        self._batches, self._indices = ready.batches, None
        self.sharded, turn = ready.sharded, (rank if ready.sharded else 0, 1)
        self._copy: BatchStream | None = None
        # of torch's generators that the loader and its samplers draw from: states at the start of the epoch
        self._states = list[tuple[torch.Generator, Tensor]]()
        if self._loader:
            self._batches = copy.copy(ready.batches)  # the attributes set below are not those of the user's loader
            self._batches._iterator = None  # persistent processes of the user's loader
            if self._batches.batch_sampler is not None:  # collate_fn is called with a list of samples
                self._batches.collate_fn = functools.partial(_collate_and_count, self._batches.collate_fn)
        if has_state(self._batches):
            self.state_dict, self.load_state_dict = self._batches.state_dict, self._batches.load_state_dict
        elif self._loader and not isinstance(self._batches.dataset, IterableDataset):
            name = "sampler" if self._batches.batch_sampler is None else "batch_sampler"
            # without processes, the samplers may draw from the same random numbers as the samples
            turn = (rank, ranks) if self._batches.num_workers and not ready.sharded else turn
            self._indices = _DealtSampler(getattr(self._batches, name), turn[0] % turn[1], turn[1])
            vars(self._batches)[name] = self._indices  # a DataLoader's attributes may not be set
        if self._loader and self._batches.num_workers:
            method = (self._batches.multiprocessing_context or multiprocessing).get_start_method()
            parent = None if method == "forkserver" else os.getpid()  # whose processes are not children of the rank
            set_up = functools.partial(_set_up_process, parent, turn[0], self._batches.worker_init_fn)
            self._batches.worker_init_fn = set_up

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchStream:
        ready = self._ready  # the samples of a DataLoader are not copied
        if not self._loader:
            ready = ReadyBatches(copy.deepcopy(ready.batches, memo), ready.size, sharded=ready.sharded)
        stream = BatchStream(ready, self._seed, self._rank, self._ranks)
        stream._epoch = self._epoch
        self._copy = stream
        return stream

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of what is read, and bring the generators to the start of the epoch.

        Raises:
            DataError: they were used for it, or for a later one.
        """
        self._epoch = epoch
        if self._loader and not _draws_from_epoch_seed(self._ready.batches):
            used = _EPOCHS.get(self._ready.batches, 0)
            if used > epoch:
                raise DataError(
                    f"The {type(self._batches).__name__} was read by an earlier call of engine.windows(), and its "
                    "generators cannot go back.\n  Build a new one, with newly seeded generators, before each call."
                )
            for past in range(used, epoch):
                HEARTBEAT.again()
                self._start_epoch(past)
                self._draw(past)
        self._start_epoch(epoch)
        holders = [self._batches, *_samplers(self._batches)] if self._loader else []
        generators = [getattr(each, "generator", None) for each in holders]
        self._states = [(each, each.get_state()) for each in generators if isinstance(each, torch.Generator)]

    def __iter__(self) -> Iterator[Identified]:
        for generator, state in self._states:  # a copy, which was read first, draws from the same generators
            generator.set_state(state)
        if self._loader:
            _EPOCHS[self._ready.batches] = self._epoch + 1
        if self._indices is not None:
            self._indices.taken.clear()
        # a stop request goes to the whole process group, and would kill a loader process that has no handlers yet
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            batches = iter(self._batches)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self._indices is None:
            yield from map(_identified, batches)
        else:
            yield from self._indices.joined_with(batches)

    def close(self) -> None:
        """End persistent loader processes."""
        if self._loader:
            self._batches._iterator = None
        if self._copy is not None:
            self._copy.close()

    def _start_epoch(self, epoch: int) -> None:
        holders = [self._ready.batches]
        if self._loader:
            holders += [self._ready.batches.dataset, *_samplers(self._ready.batches)]
        for holder in {id(each): each for each in holders}.values():
            start_epoch(holder, epoch)

    def _draw(self, epoch: int) -> None:
        """Draw from the generators and the samplers what an epoch draws from them."""
        loader = self._batches
        with SampleRandom(self._seed).continued(epoch):
            if not (epoch and loader.num_workers and loader.persistent_workers):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # seed of loader processes
            if not isinstance(loader.dataset, IterableDataset):
                sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
                collections.deque(sampler, maxlen=0)
                if self._indices is not None:
                    self._indices.taken.clear()
        if loader.num_workers and loader.persistent_workers:
            loader.generator = torch.Generator().manual_seed(self._seed)  # which gave its seed in the first epoch


class _DealtSampler:
    """Sampler that yields the indices of this rank's batches. The epoch's first batch is read by every rank, as data
    for stand-ins.

    Attributes:
        taken: (indices, whether this rank reads them) of batches drawn and not yet passed on.
    """

    def __init__(self, sampler: Any, rank: int, ranks: int) -> None:
        self._sampler, self._rank, self._ranks = sampler, rank, ranks
        self.taken = collections.deque[tuple[Any, bool]]()

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._sampler):
            reads = number % self._ranks == self._rank or not number
            self.taken.append((indices, reads))
            if reads:
                yield indices

    def joined_with(self, batches: Iterator[Any]) -> Iterator[Identified]:
        """Yield all batches; None in place of those that were not read."""
        for batch in batches:
            while not (taken := self.taken.popleft())[1]:
                yield Identified(None, taken[0])
            yield _identified(batch, taken[0])
        yield from (Identified(None, indices) for indices, _ in self.taken)


def _collate_and_count(collate: Any, samples: Any) -> Identified:
    size = len(samples) if isinstance(samples, list | tuple) else None  # a dataset may read all at once
    return Identified(collate(samples), None, size)


def _identified(read: Any, indices: Any = None) -> Identified:
    batch, _, samples = read if isinstance(read, Identified) else (read, None, None)
    if samples is None and isinstance(indices, list):
        samples = len(indices)
    return Identified(batch, batch if indices is None else indices, samples)


def _set_up_process(parent: int | None, rank: int, init: Any, worker: int) -> None:
    """Set up a process of the user's loader. ``rank``: 0 if all ranks read the same in them."""
    if parent is not None:
        guard_loader_process(parent)
    if rank:  # which reads other samples than rank 0, and draws other random numbers for them
        seed_everything(seed_for(torch.initial_seed(), f"rank/{rank}"))
    if init is not None:
        init(worker)


def _samplers(loader: Any) -> list[Any]:
    outer = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    inner = getattr(outer[1], "sampler", None)
    return [each for each in (*outer, inner) if each is not None]


def _draws_from_epoch_seed(loader: Any) -> bool:
    """Return whether each epoch draws from the global generators only, which have a seed for it."""

    def has_no_generator(sampler: Any) -> bool:
        return type(sampler) in (SequentialSampler, BatchSampler) or (
            type(sampler) is RandomSampler and sampler.generator is None
        )

    continues = loader.num_workers and loader.persistent_workers  # whose seed is drawn in the first epoch only
    streams = isinstance(loader.dataset, IterableDataset)
    return loader.generator is None and not continues and (streams or all(map(has_no_generator, _samplers(loader))))
