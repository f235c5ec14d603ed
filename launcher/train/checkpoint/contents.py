"""Contents of a checkpoint: its tensors and the description of its plan, the share of each rank, and copies in host
memory."""

from __future__ import annotations

import copy
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from launcher.plan.run_plan import RunPlan
from launcher.train.checkpoint import file_format
from launcher.train.data.randomness import random_state
from launcher.train.engine.engine import Engine
from launcher.train.parallel.base import local
from launcher.train.world import World


def tensors(engine: Engine, changing_buffers: list[str]) -> dict[str, Any]:
    """Return the checkpoint's tensors (and the optimizer's options) by name.

    Args:
        changing_buffers: names of the buffers that training changes.
    """
    model, optimizer = get_state_dict(engine.parallel.module, engine.optimizer)
    buffers = dict(engine.parallel.module.named_buffers())
    return {
        "model": model,
        "optimizer": optimizer,
        # buffers that training changes and the model's state_dict leaves out (persistent=False)
        "buffers": {name: buffers[name] for name in changing_buffers if name not in model},
        random_key(engine): random_state(engine.device),
        strategy_key(engine): engine.parallel.state_dict(),
    }


def origin(plan: RunPlan) -> dict[str, Any]:
    """Return, as JSON, the run of a checkpoint and the part of its plan that another plan must match to resume it.

    In samples: ``global_size``, ``micro_size``, ``samples`` (of an epoch; None: a stream), and ``ramp`` (a list of
    [windows, samples]). In micro-batches: ``accumulation``. ``steps``: optimizer steps, None for epochs over a stream.
    ``epochs``: None if steps were given.
    """
    return {
        "format": file_format.FORMAT,
        "run_id": plan.run.id,  # also the run's id in W&B
        "launcher_version": plan.run.version,
        "torch_version": torch.__version__,
        "world_size": plan.batch.world_size,
        "strategy": plan.strategy.kind.value,
        "shard_size": plan.strategy.shard_size,
        "global_size": plan.batch.global_size,
        "ramp": [[stage.windows, stage.global_size] for stage in plan.batch.ramp],
        "micro_size": plan.batch.micro_size,
        "accumulation": plan.batch.accumulation,
        "seed": plan.train.seed,
        "steps": plan.train.steps,
        "epochs": plan.train.epochs,
        "task_target": plan.task.target,
        "task_params": plan.task.params,
        "samples": plan.task.samples,
        "short_window": plan.epoch.short_window_policy.value,
        "optimizer": plan.optimizer.kind.value,
        "precision": plan.precision.kind.value,
        "compress": plan.strategy.compress.value,
    }


def strategy_key(engine: Engine) -> str:
    """Return the key of this rank's strategy state."""
    return f"strategy_rank{engine.world.rank}"


def random_key(engine: Engine) -> str:
    """Return the key of this rank's random state."""
    return f"random_rank{engine.world.rank}"


Path = tuple[str, ...]
# parts that are the same on all ranks, except for shards
_ALIKE = ("model", "optimizer", "buffers")


def own_share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Return ``state`` with only this rank's share of the unsharded tensors that all ranks hold: about the same number
    of bytes on each rank. Shards, state of this rank alone, and values other than tensors are kept.

    torch removes duplicates, too, but only after everything was copied.
    """
    whole = [
        (-tensor.nbytes, path)
        for path, tensor in _tensors(state)
        if path[0] in _ALIKE and not isinstance(tensor, DTensor)
    ]
    bytes_of, not_ours = [0] * world.size, set[Path]()
    for negative, path in sorted(whole):
        rank = bytes_of.index(min(bytes_of))
        bytes_of[rank] += max(1, -negative)
        if rank != world.rank:
            not_ours.add(path)
    return _without(state, not_ours, ())


def _tensors(state: dict[str, Any], above: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested dicts. A tensor in a list is not among them: it is saved as part of the list."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield (*above, key), value
        elif isinstance(value, dict):
            yield from _tensors(value, (*above, key))  # pyright: ignore[reportUnknownArgumentType]


def _without(state: dict[str, Any], left_out: set[Path], above: Path) -> dict[str, Any]:
    return {
        key: _without(value, left_out, (*above, key)) if isinstance(value, dict) else value  # pyright: ignore
        for key, value in state.items()
        if (*above, key) not in left_out
    }


class Staging:
    """Copies of tensors in host memory, at most one of each: a save reuses the memory of the previous one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Path, Tensor] = {}
        self._pinned: _Pinned | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its tensors copied to host memory. No save may still be reading the previous copy."""
        sources: dict[tuple[Any, ...], tuple[Path, Tensor]] = {}  # tied tensors have two names

        def collect(path: Path, tensor: Tensor) -> Tensor:
            source = local(tensor).detach()
            sources.setdefault(_place(path, source), (path, source))
            return tensor

        _mapped(state, (), collect)
        self._make_room(dict(sources.values()))
        for path, source in sources.values():
            self._buffers[path].copy_(source, non_blocking=True)

        def staged(path: Path, tensor: Tensor) -> Tensor:
            buffer = self._buffers[sources[_place(path, local(tensor).detach())][0]]
            if isinstance(tensor, DTensor):
                # from_local would move the buffer back to the device
                return DTensor(buffer, tensor._spec, requires_grad=False)  # pyright: ignore
            return buffer

        copied = _mapped(state, (), staged)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied

    def _make_room(self, sources: dict[Path, Tensor]) -> None:
        """Provide one buffer for each of ``sources``; reuse those of the previous copy whose shape and dtype fit."""
        before, self._buffers = self._buffers, {}
        on_device: dict[Path, Tensor] = {}
        for path, source in sources.items():
            if _is_on_device(source):
                on_device[path] = source
            if (buffer := before.get(path)) is not None and _format(buffer) == _format(source):
                self._buffers[path] = buffer
            elif path not in on_device:
                self._buffers[path] = torch.empty(source.shape, dtype=source.dtype)
        if any(path not in self._buffers for path in on_device):
            for path in on_device:
                self._buffers.pop(path, None)
            before.clear()
            self._pinned = None  # released first, so that old and new memory are not held at the same time
            self._pinned = _Pinned(on_device)
            self._buffers |= self._pinned.buffers


class _Pinned:
    """One region of page-locked host memory, with a buffer for each of ``sources``.

    ``torch.empty(pin_memory=True)`` rounds each allocation up to a power of two, which may take twice the memory; this
    takes what the tensors need, and at most a page more. The mapping is shared, because a page-locked page must not be
    copied on write when loader processes are forked. If the driver refuses, the memory stays pageable: copies are
    slower.
    """

    def __init__(self, sources: dict[Path, Tensor]) -> None:
        offsets: dict[Path, int] = {}
        size = 0
        for path, source in sources.items():
            offsets[path] = size
            size += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = mmap.mmap(-1, max(size, 1))
        self.buffers = {
            path: torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=offsets[path]).reshape(
                source.shape
            )
            for path, source in sources.items()
        }
        address, cudart = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), cast("Any", torch.cuda.cudart())
        self.nbytes = len(memory)
        if int(cudart.cudaHostRegister(address, self.nbytes, _PORTABLE)) == 0:
            weakref.finalize(self, cudart.cudaHostUnregister, address)
        else:
            print("The memory for copies of checkpoints cannot be page-locked: saving holds up the steps for longer.")


_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable


def _place(path: Path, source: Tensor) -> tuple[Any, ...]:
    """Return a key that is the same for two names of one tensor."""
    return (source.data_ptr(), source.dtype, source.shape, source.stride()) if source.numel() else (path,)


def _format(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _is_on_device(source: Tensor) -> bool:
    """Return whether a copy crosses the bus; that is asynchronous only into page-locked memory."""
    return source.is_cuda and source.numel() > 0


def _mapped(value: Any, path: Path, staged: Callable[[Path, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return staged(path, value)
    if isinstance(value, dict):
        return {key: _mapped(entry, (*path, str(key)), staged) for key, entry in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        entries = [_mapped(entry, (*path, str(n)), staged) for n, entry in enumerate(value)]  # pyright: ignore
        return entries if isinstance(value, list) else tuple(entries)
    return copy.deepcopy(value)
