"""Which tensors of a checkpoint this rank writes, and their copies in host memory, which training does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.train.step import local
from launcher.train.world import World

Path = tuple[str, ...]
# what is alike on all ranks, but for shards: every rank has it whole
_ALIKE = ("model", "optimizer", "buffers")


def own_share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Of the tensors that every rank has whole, those that this rank writes: about as many bytes on each. Shards, what
    is of one rank alone, and what is no tensor stay as they are.

    torch would come to as much by itself, but only after everything was copied.
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
    """Those in dicts within dicts: one in a list is written with the list, by any rank."""
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
    """Copies, at most one of each tensor: the next save writes over those of the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Path, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in {id(buffer): buffer for buffer in self._buffers.values()}.values())

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with its tensors in host memory; no save may still be reading the last copy."""
        before, self._buffers = self._buffers, {}
        seen: dict[tuple[Any, ...], Tensor] = {}  # tied tensors have two names

        def staged(path: Path, tensor: Tensor) -> Tensor:
            source = local(tensor).detach()
            place = (source.data_ptr(), source.dtype, source.shape, source.stride()) if source.numel() else (path,)
            if (buffer := seen.get(place)) is None:
                buffer = before.pop(path, None)
                if any(buffer is taken for taken in seen.values()):  # two names had one tensor, and have no more
                    buffer = None
                if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                    pinned = self._device.type == "cuda" and source.numel() > 0
                    buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
                seen[place] = buffer.copy_(source, non_blocking=True)
            self._buffers[path] = buffer
            if isinstance(tensor, DTensor):
                # from_local would send it back to the device
                return DTensor(buffer, tensor._spec, requires_grad=False)  # pyright: ignore
            return buffer

        copied = _mapped(state, (), staged)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied


def _mapped(value: Any, path: Path, staged: Callable[[Path, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return staged(path, value)
    if isinstance(value, dict):
        return {key: _mapped(entry, (*path, str(key)), staged) for key, entry in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        entries = [_mapped(entry, (*path, str(n)), staged) for n, entry in enumerate(value)]  # pyright: ignore
        return entries if isinstance(value, list) else tuple(entries)
    return copy.deepcopy(value)
