"""Reading of samples, and loader processes that do it ahead of the step."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import gc
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from launcher.errors import DataError, LauncherError
from launcher.plan.run_plan import RunPlan
from launcher.process import STOP_SIGNALS, die_with_parent
from launcher.tracebacks import failure_in_loader


def wait_for_registering_threads() -> None:
    """Wait until no thread is registering itself with Python.

    Loader processes are also forked during training, while gloo's threads enter and leave Python. Before Python 3.12, a
    fork while one of them registers itself copies a held lock, and the child waits for it indefinitely.
    ``sys._current_frames`` takes and releases that lock. One may begin to register in the moment after it, and other
    libraries have locks, too: so ``_start`` replaces a process that does not start.
    """
    collects = gc.isenabled()
    gc.disable()  # freeing a tensor lets other threads run, which would wait for the lock, and this one for them
    try:
        sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    finally:
        if collects:
            gc.enable()


if sys.version_info < (3, 12):
    os.register_at_fork(before=wait_for_registering_threads)

_LIBC = ctypes.CDLL(None)
_NO_LIBRARY = ctypes.c_byte()  # libc identifies the handlers of a library by an address in it


def require_free_exit_lock() -> None:
    """Take and release libc's lock of exit handlers, which waits indefinitely if another thread held it at the fork.

    Unlike its other locks, libc does not reset this one in a child. C++ libraries register handlers when they are
    loaded and when they are first used. A loader process would wait for the lock then, after it has started.
    """
    _LIBC.__cxa_finalize(ctypes.byref(_NO_LIBRARY))


# Up to this size, sending a tensor by value through the loader's pipe is cheaper. torch sends a file descriptor of
# shared memory over a separate socket connection: about 0.2 ms per tensor, regardless of its size.
BY_VALUE_BYTES = 64 * 1024

# Seconds that loader processes have to start, which takes milliseconds, and how often they are started in all.
START_S = 60.0
STARTS = 3

Collate = Callable[[list[Any]], Any]  # samples -> batch


@dataclass(frozen=True)
class MicroBatch:
    """One rank's micro-batch.

    Args:
        data: the collated batch, on the device.
        samples: number of samples that count; 0 for a stand-in, which runs with weight zero because other ranks have
            samples for one more micro-batch than this rank.
        note: sent with it by the source.
    """

    data: Any
    samples: int
    note: Any = None


def prefetch(
    source: Dataset[Any],
    plan: RunPlan,
    device: torch.device,
    seed: int,
    order: Iterable[Any] | None = None,
    readers: int = 1,
) -> Generator[MicroBatch, None, None]:
    """Yield micro-batches of ``source``, which loader processes read ahead of the step: as many as two windows are
    planned to have.

    Args:
        source: dataset of the arguments of MicroBatch: one item for each element of ``order``, or iterable if ``order``
            is None.
        seed: seed of the loader processes' random numbers, for a dataset that augments or shuffles.
        readers: number of loader processes among which an iterable divides its items; they are read in turn.
    """
    workers = plan.train.loader_workers if order is not None else min(readers, plan.train.loader_workers)
    packs, pins = workers > 0 and device.type == "cpu", device.type == "cuda"  # batches for a GPU use pinned memory
    if not workers and not pins:  # DataLoader would only add overhead
        # a generator: StopIteration from a dataset is an error in it, and would end a `map` silently
        for spec in source if order is None else order:
            data, *rest = spec if order is None else source[spec]
            # a stream is read ahead of the backward pass: it may write each batch into the same memory
            yield MicroBatch(copied(data) if order is None else data, *rest)
        return
    if workers:
        source = _Guarded(source, packs) if order is not None else _GuardedStream(source, packs)
    loader = functools.partial(
        DataLoader[Any],
        source,
        batch_size=None,
        num_workers=workers,
        collate_fn=_Pinned if pins else _identity,
        prefetch_factor=max(2, -(-2 * plan.batch.accumulation // workers)) if workers else None,
        pin_memory=pins,
    )
    items = _start(loader, workers, order, seed)
    for item in items:
        if isinstance(item, _Failed):
            raise DataError(item.text)
        data, *rest = pickle.loads(item) if packs else item
        yield MicroBatch(to_device(data, device), *rest)


def _start(
    loader: Callable[..., DataLoader[Any]], workers: int, order: Iterable[Any] | None, seed: int
) -> Iterator[Any]:
    """Return the items of the loader, whose processes have started.

    A process that was forked while another thread held a lock may wait for that lock indefinitely. Such processes are
    ended, and all are started again with the same ``order``.
    """
    specs = None
    for _ in range(STARTS):
        if order is not None:
            order, specs = itertools.tee(order)  # keeps what is taken of `specs` until this function returns
        before, started = set(multiprocessing.active_children()), multiprocessing.Semaphore(0)
        # a stop request goes to the whole process group, and would kill a loader process that has no handlers yet
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            items = iter(
                loader(
                    sampler=specs,
                    worker_init_fn=functools.partial(_init_loader_process, os.getpid(), started),
                    # separate: reading data must not draw from the random numbers that dropout uses
                    generator=torch.Generator().manual_seed(seed),
                )
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        processes = set(multiprocessing.active_children()) - before
        if not (missing := _not_started(processes, started)):
            return items
        print(f"{missing} of {workers} loader processes did not start within {START_S:g} s.", flush=True)
        del items  # before the processes are killed, which would be an error of the loader
        for process in processes:
            process.kill()
            process.join()
    raise DataError(
        f"Loader processes did not start, {STARTS} times.\n  With train.loader_workers=0 the data is read without them."
    )


def _not_started(processes: set[Any], started: Any) -> int:
    """Return how many of ``processes`` have not released ``started`` within START_S; 0 if one has died, which the
    loader reports."""
    missing, end = len(processes), time.monotonic() + START_S
    while missing and time.monotonic() < end and all(process.is_alive() for process in processes):
        missing -= started.acquire(timeout=min(1.0, START_S))
    return missing if all(process.is_alive() for process in processes) else 0


def _init_loader_process(parent: int, started: Any, worker: int) -> None:  # noqa: ARG001
    """Set up a loader process, and release ``started``."""
    guard_loader_process(parent)
    started.release()


def guard_loader_process(parent: int) -> None:
    """Set up the signals of a loader process of the rank ``parent``.

    Its signals are set so that it ends only with its rank, or by its rank's SIGTERM. A stop request is sent to a rank's
    whole process group, or to every process of a job, but the rank's last window still needs its data.
    """
    os.setpgid(0, 0)
    die_with_parent(parent)
    for number in set(STOP_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_on_sigterm_of, args=(parent,), daemon=True).start()
    require_free_exit_lock()


def _exit_on_sigterm_of(parent: int) -> None:
    """Wait for a SIGTERM from the process ``parent``, and exit."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _identity(item: Any) -> Any:
    return item


class _Failed(NamedTuple):
    """Error raised by the user's code in a loader process, sent instead of a batch.

    torch itself would raise an exception of the same type, with the whole traceback as its message.
    """

    text: str


def _failed(error: Exception) -> _Failed:
    return _Failed(str(error) if isinstance(error, LauncherError) else failure_in_loader(error))


class _Guarded(Dataset[Any]):
    """The source in a loader process, which returns packed batches, or ``_Failed`` if it raised an error."""

    def __init__(self, source: Any, packs: bool) -> None:
        self._source, self._pack = source, _pack if packs else _identity

    def __getitem__(self, spec: Any) -> Any:
        try:
            return self._pack(self._source[spec])
        except Exception as error:
            return _failed(error)


class _GuardedStream(IterableDataset[Any]):
    def __init__(self, source: Any, packs: bool) -> None:
        self._source, self._pack = source, _pack if packs else _identity

    def __iter__(self) -> Generator[Any, None, None]:
        try:
            yield from map(self._pack, self._source)
        except Exception as error:
            yield _failed(error)


class _Packer(ForkingPickler):
    """The loader's own pickler, which shares memory, except that it sends small plain tensors by value."""

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        plain = type(obj) is Tensor and obj.layout == torch.strided and not (obj.requires_grad or obj.is_conj())
        if not plain or obj.nbytes > BY_VALUE_BYTES or obj.is_neg():
            return NotImplemented
        dense = obj.contiguous()
        return _unpack, (ctypes.string_at(dense.data_ptr(), dense.nbytes), obj.dtype, obj.shape)


def _pack(item: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer).dump(item)
    return buffer.getvalue()


def _unpack(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def read_samples(dataset: Any, indices: Sequence[Any]) -> list[Any]:
    """Return the samples ``indices``, read at once if the dataset can do that, as torch's DataLoader does."""
    if type(dataset) is Subset:
        return read_samples(dataset.dataset, [dataset.indices[index] for index in indices])
    if reads_several(dataset):
        samples = dataset.__getitems__(list(indices))
        if isinstance(samples, list | tuple) and len(samples) == len(indices):
            return list(samples)
    return [dataset[index] for index in indices]


def reads_several(dataset: Any) -> bool:
    """Return whether samples are read by ``__getitems__``; a subclass that redefines only ``__getitem__`` is not."""
    methods = (name for cls in type(dataset).__mro__ for name in ("__getitems__", "__getitem__") if name in vars(cls))
    return next(methods, "") == "__getitems__"


def read_tensors(dataset: Any, indices: Sequence[Any]) -> list[Tensor] | None:
    """Return the batch that default_collate makes of the samples of a TensorDataset; None for any other dataset."""
    if type(dataset) is Subset:
        return read_tensors(dataset.dataset, [dataset.indices[index] for index in indices])
    if type(dataset) is not TensorDataset or any(type(tensor) is not Tensor for tensor in dataset.tensors):
        return None
    # numbers, because torch takes a list of tensors for one index into several dimensions
    rows = [int(index) for index in indices]
    return [tensor[rows] for tensor in dataset.tensors]


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``.

    Tensors are found in the containers of torch's pytree (including named tuples, defaultdict and registered classes),
    dataclasses, and other mappings and sequences. An object with a ``to`` method is moved by calling it.
    """
    return value if device.type == "cpu" else _mapped(value, "to", functools.partial(_move_object, device=device))


def _move_object(item: Any, device: torch.device) -> Any:
    try:
        parameters = inspect.signature(item.to).parameters.values()
    except ValueError:  # a built-in method, such as a tensor's
        return item.to(device, non_blocking=True)
    asynchronous = any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)
    moved = item.to(device, non_blocking=True) if asynchronous else item.to(device)
    return item if moved is None else moved  # some classes move in place and return None


def _mapped(value: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` in which each object that has a method ``method`` is replaced by ``change(object)``.

    The containers in ``value`` keep their types.
    """

    def has_method(item: Any) -> bool:
        return callable(getattr(item, method, None)) and not isinstance(item, type)

    def leaf(item: Any) -> Any:
        if has_method(item):
            return change(item)
        # containers that pytree treats as leaves
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            clone = copy.copy(item)
            for each in dataclasses.fields(item):
                if hasattr(item, each.name):
                    object.__setattr__(clone, each.name, inner(getattr(item, each.name)))  # frozen ones too
            return clone
        if isinstance(item, MutableMapping):
            clone = cast("MutableMapping[Any, Any]", copy.copy(item))
            for key in list(clone):
                clone[key] = inner(clone[key])
            return clone
        if isinstance(item, list | tuple):
            items: Any = [inner(each) for each in cast("Sequence[Any]", item)]
            return type(item)(*items) if hasattr(item, "_fields") else type(item)(items)
        return item

    def inner(item: Any) -> Any:
        return tree_map(leaf, item, is_leaf=lambda each: has_method(each) or isinstance(each, torch.Size))

    return inner(value)


def copied(value: Any) -> Any:
    """Return ``value`` with a copy of each tensor and NumPy array in it; they are found as in ``to_device``."""
    return _mapped(value, "__deepcopy__", _copy)


def _copy(item: Any) -> Any:
    if type(item) is not Tensor:
        return copy.deepcopy(item)
    # not deepcopy, which copies the whole tensor of a view, and refuses a result of autograd
    return item.detach().clone().requires_grad_(item.requires_grad) if item.is_leaf else item


class _Pinned:
    """Wrapper that gives a batch a method ``pin_memory``, so that DataLoader pins tensors in any container."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def pin_memory(self) -> Any:
        if isinstance(self.item, _Failed):
            return self.item
        data, *rest = self.item
        # a collate_fn, or a loader such as DALI's, may have made it on the GPU, in memory that it uses again
        pinned = _mapped(data, "pin_memory", lambda x: _copy(x) if getattr(x, "is_cuda", False) else x.pin_memory())
        return pinned, *rest
