"""Equality of ranks: the model at the start, and its buffers at the start of each window, are those of rank 0.

The module does this in the same way for all strategies. DDP would broadcast by itself: the model at the start, and in
each forward pass every buffer, changed or not. ``fully_shard`` broadcasts nothing: if initial values came from a
generator with different seeds, each rank would keep a shard of its own model, and replicas of HSDP would stay
different."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from launcher.errors import TaskError
from launcher.heartbeat import HEARTBEAT
from launcher.plan.sync_policy import Collective
from launcher.train.measure.comm_meter import Meter
from launcher.train.measure.observer import EndedWindow, Observer
from launcher.train.parallel.base import local
from launcher.train.world import Everyone, World, sending_device


def require_same_structure(model: nn.Module, world: Everyone) -> None:
    """Check that all ranks have parameters and buffers with the same names, shapes and dtypes. All ranks call it.

    Raises:
        TaskError: they differ; raised on all ranks, with the first difference.
    """
    if world.size == 1:
        return
    digests = world.of_all(structure_digest(model))
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everyone = world.of_all(dict(_structure(model)))
    here, there = everyone[0], everyone[rank]
    name = next((name for name in (*here, *there) if here.get(name) != there.get(name)), None)
    what = "the order of its parameters" if name is None else (
        f"{name} is {here.get(name, 'missing')} on rank 0 and {there.get(name, 'missing')} on rank {rank}"
    )  # fmt: skip
    raise TaskError(
        f"The model differs between ranks: {what}.\n"
        "  Every rank must build the same model: its shape must not depend on the rank or on unseeded random numbers."
    )


def structure_digest(model: nn.Module) -> str:
    """Return a hash of the names, shapes and dtypes of all parameters and buffers."""
    return hashlib.blake2b(repr(_structure(model)).encode(), digest_size=16).hexdigest()


def _structure(model: nn.Module) -> list[tuple[str, str]]:
    return [
        *(
            (name, f"a {'trained' if p.requires_grad else 'frozen'} parameter{_described(p)}")
            for name, p in model.named_parameters()
        ),
        *((name, f"a buffer{_described(buffer)}") for name, buffer in model.named_buffers()),
    ]


@torch.no_grad()
def share_model(model: nn.Module, world: World) -> None:
    """Give every rank the values of rank 0's model. All ranks call it, before the model is sharded."""
    share_values([*model.parameters(), *model.buffers()], world)


@torch.no_grad()
def share_values(tensors: Sequence[Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place. Only tensors whose checksums differ are sent. All ranks call it."""
    with_values = [tensor for tensor in tensors if _has_values(tensor)]
    if world.size == 1 or not with_values:
        return
    own = list[int]()
    for tensor in with_values:
        HEARTBEAT.again()
        own.append(int(checksum(tensor)))
    everyone = world.of_all(own)
    for tensor, *checksums in zip(with_values, *everyone, strict=True):
        HEARTBEAT.again()
        if len(set(checksums)) > 1:
            sent = tensor.detach().resolve_conj().resolve_neg().contiguous().to(sending_device())
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
            tensor.copy_(sent)


def _described(tensor: Tensor) -> str:
    return f" of shape {None if is_lazy(tensor) else tuple(tensor.shape)} in {tensor.dtype}"


def _has_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is plain (dense, not sharded, not quantized), not on meta, and not empty."""
    plain = not isinstance(tensor, DTensor) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_meta and tensor.numel() > 0


# 64-bit words that are mixed at once, with as much memory beside the tensor: 1 MiB fits a core's cache, and a GPU
# spends more time on its kernels than on starting them
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 23
BITS = (1 << 62) - 1  # of a checksum, whose negative is an int64 too
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # odd


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number of 62 bits for the bit pattern of this rank's part of a tensor, as a tensor on its device.

    Values are weighted by their position, so that a permutation is noticed. The bits of a product are mixed before they
    are added: changes of two sign bits would cancel otherwise.
    """
    data = local(tensor).detach()
    if data.layout != torch.strided or not data.numel():
        return torch.zeros((), dtype=torch.int64, device=data.device)
    data = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.storage_offset() * data.itemsize % 8:  # cannot be read as 64-bit words
        data = data.clone()
    octets = data.view(torch.uint8)
    words = octets[: len(octets) // 8 * 8].view(torch.int64)
    chunk = _CPU_CHUNK if data.device.type == "cpu" else _GPU_CHUNK
    weights = torch.arange(1, min(len(words), chunk) + 8, device=data.device) * _MIX[0]
    weights = ((weights ^ (weights >> 29)) * _MIX[1]) | 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for place, numbers in enumerate([octets[len(words) * 8 :].long(), *words.split(chunk)]):
        mixed = numbers * weights[: len(numbers)]
        total += mixed.bitwise_xor_(mixed >> 32).sum() * (place * _MIX[2] & BITS | 1)
    return total & BITS


# buffers are compared bit by bit: nan then equals itself, and minus zero differs from zero
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
Form = tuple[tuple[int, ...], torch.dtype]


class Buffers(Observer):
    """Observer of the buffers of ``module``, which is wrapped already: finds those that training changes, and makes
    them equal on all ranks. It refers to them by name, since a forward pass may replace the tensors.
    """

    def __init__(self, module: nn.Module, world: World, device: torch.device) -> None:
        self._module, self._world, self._device = module, world, device
        self._still = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._initial = frozenset(self._still)
        self._changing: dict[str, Form] = {}
        self._due = False  # a rank has seen a change in the window under way
        self._rank_local = set[str]()  # buffers whose shapes differ between ranks: each rank keeps its own

    @torch.no_grad()
    def changed(self) -> Tensor | float:
        """Return a value above 0 if a buffer that was not known to change has changed on this rank. It may be a tensor
        on the device, to be sent with the window's totals without waiting for a GPU."""
        now = dict(self._module.named_buffers())
        if self._strange(now):
            return 1.0
        if self._device.type == "cpu":
            return float(any(differs(now[name], before) for name, before in self._still.items()))
        differ = [(_bits(now[name]) != _bits(before)).any() for name, before in self._still.items()]
        return torch.stack(differ).any().double() if differ else 0.0

    def contribution(self) -> Sequence[Tensor | float]:
        if self._still or self._changing or self._rank_local:
            return [self.changed()]
        modules = [self._module]
        for module in modules:  # it grows; ``named_buffers`` takes several times as long
            if module._buffers:
                return [self.changed()]
            modules += filter(None, module._modules.values())
        return [0.0]

    def receive(self, sums: Sequence[float]) -> None:
        self._due = sums[0] > 0

    def window_ended(self, window: EndedWindow) -> None:  # noqa: ARG002
        if self._due:
            self.watch()

    def watch(self) -> None:
        """Find the buffers that have changed on any rank. All ranks call it: after a window in which ``changed`` was
        above 0 on one of them, and before checkpoints."""
        now = dict(self._module.named_buffers())
        strange = self._strange(now)
        changed = {name for name, before in self._still.items() if name in strange or differs(now[name], before)}
        forms = {name: _form(buffer) for name, buffer in now.items()}
        everyone = self._world.of_all((changed | strange, forms))
        found = set[str]().union(*(names for names, _ in everyone))
        for name in (name for name in [*forms, *(found - forms.keys())] if name in found):
            self._still.pop(name, None)
            self._changing.pop(name, None)
            if name in forms and all(theirs.get(name) == forms[name] for _, theirs in everyone):
                self._changing[name] = forms[name]
            elif any(name in theirs for _, theirs in everyone):
                self._rank_local.add(name)
                if self._world.rank == 0:
                    print(f"Buffer {name} has another shape on each rank: every rank keeps its own.", flush=True)

    def _strange(self, now: dict[str, Tensor]) -> set[str]:
        """Return the names of buffers that have appeared, disappeared, or changed their shape or dtype."""
        previous = self._changing | {name: _form(buffer) for name, buffer in self._still.items()}
        forms = {name: _form(buffer) for name, buffer in now.items()}
        return {
            name for name in previous.keys() | forms.keys() if previous.get(name) != forms.get(name)
        } - self._rank_local

    @property
    def late(self) -> list[str]:
        """Names of the buffers that forward passes have registered."""
        return [name for name in self._changing if name not in self._initial]

    @property
    def gone(self) -> list[str]:
        """Names of the buffers that forward passes have set to None or removed."""
        return sorted(self._initial - dict(self._module.named_buffers()).keys())

    @property
    def changing(self) -> list[str]:
        """Names of the buffers that are known to change."""
        return list(self._changing)

    def mark_changing(self, names: list[str]) -> None:
        """Mark the buffers ``names`` as changing, and take the present values of all others as unchanged. All ranks
        pass the same names, from a checkpoint."""
        now = dict(self._module.named_buffers())
        self._changing |= {name: _form(now[name]) for name in names if name in now}
        self._still = {name: b.detach().clone() for name, b in now.items() if name not in self._changing}

    @torch.no_grad()
    def share(self, meter: Meter, *, watch: bool = False) -> None:
        """Copy rank 0's changing buffers to all ranks, with one broadcast for each dtype. ``watch``: call ``watch``
        first."""
        if watch:
            self.watch()
        if self._world.size == 1 or not self._changing:
            return
        now = dict(self._module.named_buffers())
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self._changing:
            by_dtype.setdefault(now[name].dtype, []).append(now[name])
        for buffers in by_dtype.values():
            together = torch.cat([buffer.flatten().to(self._device) for buffer in buffers])
            with meter.blocking(Collective.broadcast, together.nbytes):
                dist.broadcast(together, 0)
            for buffer, value in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))


def _form(buffer: Tensor) -> Form:
    return tuple(buffer.shape), buffer.dtype


def _bits(buffer: Tensor) -> Tensor:
    flat = buffer.detach().contiguous().reshape(-1)
    return flat.view(_BITS[flat.itemsize])


def differs(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype differ in any bit."""
    return not torch.equal(_bits(one), _bits(other))
