"""Buffers that training changes (a BatchNorm's statistics): rank 0's, at the start of each window, on every rank.

DDP does this in forward, for every buffer, changed or not; FSDP does not. Here it is one thing for all strategies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.policy import Collective
from launcher.train.meter import Meter
from launcher.train.world import World

# reinterpreting the bits: nan equals itself then, and minus zero is not zero
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
Form = tuple[tuple[int, ...], torch.dtype]


class Buffers:
    """The buffers of ``module``, wrapped already. By name: a forward pass may put new tensors in their place."""

    def __init__(self, module: nn.Module, world: World, device: torch.device) -> None:
        self._module, self._world, self._device = module, world, device
        self._still = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._changing: dict[str, Form] = {}
        self._own = set[str]()  # each rank keeps its own: their shapes differ between ranks

    @torch.no_grad()
    def changed(self) -> Tensor | float:
        """Return more than 0 where a buffer that was not known to change has changed on this rank; for the window's
        flags, so the host does not wait for a GPU."""
        now = dict(self._module.named_buffers())
        if self._strange(now):
            return 1.0
        if self._device.type == "cpu":
            return float(any(differs(now[name], before) for name, before in self._still.items()))
        differ = [(_bits(now[name]) != _bits(before)).any() for name, before in self._still.items()]
        return torch.stack(differ).any().double() if differ else 0.0

    def watch(self) -> None:
        """Find out which buffers have changed, on any rank. All ranks call it: after a window in which ``changed`` said
        so on one of them, and before checkpoints."""
        now = dict(self._module.named_buffers())
        strange = self._strange(now)
        changed = {name for name, before in self._still.items() if name in strange or differs(now[name], before)}
        forms = {name: _form(buffer) for name, buffer in now.items()}
        everyone = self._world.of_all((changed | strange, forms))
        found = set[str]().union(*(names for names, _ in everyone))
        for name in (name for name in [*forms, *(found - forms.keys())] if name in found):
            if not any(name in theirs for _, theirs in everyone):
                self._still.pop(name, None)
                self._changing.pop(name, None)
                continue
            alike = name in forms and all(theirs.get(name) == forms[name] for _, theirs in everyone)
            self._still.pop(name, None)
            self._changing.pop(name, None)
            if alike:
                self._changing[name] = forms[name]
            else:
                self._own.add(name)
                if self._world.rank == 0:
                    print(f"Buffer {name} has another shape on each rank: every rank keeps its own.", flush=True)

    def _strange(self, now: dict[str, Tensor]) -> set[str]:
        """Return the names of buffers that have appeared, vanished, or taken another shape or format."""
        known = self._changing | {name: _form(buffer) for name, buffer in self._still.items()}
        forms = {name: _form(buffer) for name, buffer in now.items()}
        return {name for name in known.keys() | forms.keys() if known.get(name) != forms.get(name)} - self._own

    @property
    def changing(self) -> list[str]:
        """Names of those that are known to change."""
        return list(self._changing)

    def know(self, names: list[str]) -> None:
        """Take it that these change, and the others are as they are now. All ranks pass the same, of a checkpoint."""
        now = dict(self._module.named_buffers())
        self._changing |= {name: _form(now[name]) for name in names if name in now}
        self._still = {name: b.detach().clone() for name, b in now.items() if name not in self._changing}

    @torch.no_grad()
    def share(self, meter: Meter, *, watch: bool = False) -> None:
        """Give every rank what rank 0 has, all of one format at once. ``watch``: look for further changes first."""
        if watch:
            self.watch()
        if self._world.size == 1 or not self._changing:
            return
        now = dict(self._module.named_buffers())
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self._changing:
            by_dtype.setdefault(now[name].dtype, []).append(now[name])
        for buffers in by_dtype.values():
            together = torch.cat([buffer.flatten() for buffer in buffers])
            flight = meter.take_off()
            meter.count(Collective.broadcast, together.nbytes)
            with meter.waiting():
                dist.broadcast(together, 0)
            flight.land()
            for buffer, value in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))


def _form(buffer: Tensor) -> Form:
    return tuple(buffer.shape), buffer.dtype


def _bits(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().reshape(-1)
    return flat.view(_BITS[flat.itemsize])


def differs(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(_bits(one), _bits(other))
