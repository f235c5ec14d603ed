"""Loader processes: samples are read and collated ahead of the step, and handed over at the least cost."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from launcher.plan import RunPlan
from launcher.process import STOP_SIGNALS, die_with_parent

# Loader processes are forked in the middle of a run too, while gloo's threads come and go in Python. Before Python 3.12
# a fork while one of them registers itself leaves the child waiting for that thread's lock for ever. Taking the lock
# once, as this call does, waits until nobody is half way.
if sys.version_info < (3, 12):
    os.register_at_fork(before=sys._current_frames)  # pyright: ignore[reportPrivateUsage]

# Up to this size a tensor is cheaper sent by value through the loader's pipe. torch sends each one as a file descriptor
# of shared memory, over a socket connection of its own: about 0.2 ms a tensor, whatever its size.
BY_VALUE_BYTES = 64 * 1024


@dataclass(frozen=True)
class MicroBatch:
    """``data``: collated, on the device. ``samples``: how many count; 0 in a stand-in that runs with weight zero
    because the other ranks have one more micro-batch than this rank has samples for."""

    data: Any
    samples: int


def prefetch(
    source: Dataset[Any], plan: RunPlan, device: torch.device, seed: int, order: Iterable[Any] | None = None
) -> Generator[MicroBatch, None, None]:
    """Micro-batches of ``source``, from loader processes that stay two windows ahead of the step.

    Args:
        source: gives (batch, samples), for each element of ``order``, or in its own order if it is iterable.
        seed: of the loader processes' random numbers, for a dataset that augments or shuffles.
    """
    # of an iterable, each process would read a copy
    workers = plan.train.loader_workers if order is not None else min(1, plan.train.loader_workers)
    packs = workers > 0 and device.type == "cpu"  # batches for a GPU go through pinned memory, as tensors
    if packs:
        source = _Packed(source) if order is not None else _PackedStream(source)
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,
        sampler=order,  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        collate_fn=_as_is,
        prefetch_factor=max(2, -(-2 * plan.batch.accumulation // workers)) if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=functools.partial(_init_loader_process, os.getpid()),
        # a generator of its own: reading data must not draw from the stream that dropout uses
        generator=torch.Generator().manual_seed(seed),
    )
    for item in loader:
        data, samples = pickle.loads(item) if packs else item
        yield MicroBatch(to_device(data, device), samples)


def _init_loader_process(parent: int, worker: int) -> None:  # noqa: ARG001
    """A stop request goes to a rank's whole process group, or to every process of a job, but the rank's last window
    still needs its data: a loader process goes when its rank does, or by a SIGTERM of its rank's."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    for number in set(STOP_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(parent,), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _as_is(item: Any) -> Any:
    return item


class _Packed(Dataset[bytes]):
    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, spec: Any) -> bytes:
        return _pack(self._source[spec])


class _PackedStream(IterableDataset[bytes]):
    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Generator[bytes, None, None]:
        yield from map(_pack, self._source)


class _Packer(ForkingPickler):
    """As the loader's own pickler, which shares memory, but for small plain tensors."""

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        plain = type(obj) is Tensor and obj.layout == torch.strided and not (obj.requires_grad or obj.is_conj())
        if not plain or obj.nbytes > BY_VALUE_BYTES or obj.is_neg():
            return NotImplemented
        whole = obj.contiguous()
        return _unpack, (ctypes.string_at(whole.data_ptr(), whole.nbytes), obj.dtype, obj.shape)


def _pack(item: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer).dump(item)
    return buffer.getvalue()


def _unpack(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


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
