"""Ready batches: those of a DataLoader, or of an iterable, as a stream whose samples are micro-batches.

Every rank has the same batches and uses its own in turn. It reads all of them, except that loader processes read only
those of their rank, if a sampler draws their indices. The random numbers that an epoch draws from torch's,
Python's and NumPy's global generators follow from train.seed and the epoch, and the generators of a DataLoader and its
samplers are as in a plain loop over it: a resume draws from them for the epochs before.
"""

from __future__ import annotations

import base64
import collections
import copy
import functools
import io
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from launcher.errors import DataError
from launcher.process import STOP_SIGNALS
from launcher.task import ReadyBatches, is_loader, seed_everything, seed_for
from launcher.train.data.loader import guard_loader_process
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.stream import start_epoch
from launcher.train.data.stream_state import Identified, has_state

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
        self.sharded = ready.sharded
        if self._loader:
            self._batches = copy.copy(ready.batches)  # the attributes set below are not those of the user's loader
            self._guard_processes()
            if self._batches.batch_sampler is not None:  # collate_fn is called with a list of samples
                self._batches.collate_fn = functools.partial(_collate_and_count, self._batches.collate_fn)
        if has_state(self._batches):
            self.state_dict, self.load_state_dict = self._state, self._load_state
        elif self._loader and not isinstance(self._batches.dataset, IterableDataset):
            name = "sampler" if self._batches.batch_sampler is None else "batch_sampler"
            # without processes, the samplers may draw from the same random numbers as the samples
            turn = (rank, ranks) if self._batches.num_workers and not ready.sharded else (0, 1)
            self._indices = _Recorded(getattr(self._batches, name), *turn)
            vars(self._batches)[name] = self._indices  # a DataLoader's attributes may not be set

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchStream:
        ready = self._ready  # the samples of a DataLoader are not copied
        if not self._loader:
            ready = ReadyBatches(copy.deepcopy(ready.batches, memo), ready.size, sharded=ready.sharded)
        stream = BatchStream(ready, self._seed, self._rank, self._ranks)
        stream._epoch = self._epoch
        return stream

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of what is read, and bring the generators to the start of the epoch.

        Raises:
            DataError: they were used for it, or for a later one.
        """
        self._epoch = epoch
        if self._loader and not _draws_anew(self._batches):
            used = _EPOCHS.get(self._ready.batches, 0)
            if used > epoch:
                raise DataError(
                    f"The {type(self._batches).__name__} was read by an earlier call of engine.windows(), and its "
                    "generators cannot go back.\n  Build a new one, with newly seeded generators, before each call."
                )
            for past in range(used, epoch):
                self._start_epoch(past)
                self._draw(past)
        self._start_epoch(epoch)

    def __iter__(self) -> Iterator[Identified]:
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

    def _guard_processes(self) -> None:
        loader: Any = self._batches
        method = (loader.multiprocessing_context or multiprocessing).get_start_method()
        if loader.num_workers and method != "forkserver":  # whose processes are not children of the rank
            own = (os.getpid(), self._rank if self._ranks > 1 else 0, loader.worker_init_fn)
            loader.worker_init_fn = functools.partial(_init_loader_process, *own)

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
        if loader.num_workers and loader.persistent_workers:
            loader.generator = torch.Generator().manual_seed(self._seed)  # which gave its seed in the first epoch

    def _state(self) -> dict[str, str]:
        buffer = io.BytesIO()
        torch.save(self._batches.state_dict(), buffer)  # may hold tensors and bytes, which JSON cannot
        return {"state": base64.b85encode(buffer.getvalue()).decode()}

    def _load_state(self, state: dict[str, str]) -> None:
        buffer = io.BytesIO(base64.b85decode(state["state"]))
        self._batches.load_state_dict(torch.load(buffer, weights_only=True))


class _Recorded:
    """Sampler that yields the indices of a rank's batches, and of the first one, which may be a stand-in.

    Attributes:
        taken: indices that were drawn and not yet read, and whether they were yielded.
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


class _Counted(NamedTuple):
    """A batch, and the number of samples that it was made of; None if that is not known."""

    batch: Any
    samples: int | None


def _collate_and_count(collate: Any, samples: Any) -> _Counted:
    size = len(samples) if isinstance(samples, list | tuple) else None  # a dataset may read all at once
    return _Counted(collate(samples), size)


def _identified(read: Any, indices: Any = None) -> Identified:
    batch, samples = read if isinstance(read, _Counted) else (read, None)
    if samples is None and isinstance(indices, list):
        samples = len(indices)
    return Identified(batch, batch if indices is None else indices, samples)


def _init_loader_process(parent: int, rank: int, init: Any, worker: int) -> None:
    guard_loader_process(parent)
    if rank:  # which reads other samples than rank 0, and draws other random numbers for them
        seed_everything(seed_for(torch.initial_seed(), f"rank/{rank}"))
    if init is not None:
        init(worker)


def _samplers(loader: Any) -> list[Any]:
    outer = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    inner = getattr(outer[1], "sampler", None)
    return [each for each in (*outer, inner) if each is not None]


def _draws_anew(loader: Any) -> bool:
    """Return whether each epoch draws from the global generators only, which have a seed for it."""

    def anew(sampler: Any) -> bool:
        return type(sampler) in (SequentialSampler, BatchSampler) or (
            type(sampler) is RandomSampler and sampler.generator is None
        )

    return loader.generator is None and all(map(anew, _samplers(loader)))
