"""Replicas: every rank starts with the same model, parameter by parameter and buffer by buffer: rank 0's.

DDP broadcasts by itself. ``fully_shard`` does not: each rank would keep its own shard of its own model, and replicas of
HSDP would stay different where values are drawn from a generator that is not seeded alike.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.errors import TaskError
from launcher.train.world import World


def require_same_structure(model: nn.Module, world: World) -> None:
    """Make sure that all ranks hold parameters and buffers of the same names and shapes. All ranks call it.

    Raises:
        TaskError: on all ranks, with what differs.
    """
    if world.size == 1:
        return
    parts = [
        *(
            (name, f"a {'trained' if p.requires_grad else 'frozen'} parameter{_form(p)}")
            for name, p in model.named_parameters()
        ),
        *((name, f"a buffer{_form(buffer)}") for name, buffer in model.named_buffers()),
    ]
    digests = world.of_all(hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everyone = world.of_all(dict(parts))
    here, there = everyone[0], everyone[rank]
    name = next((name for name in (*here, *there) if here.get(name) != there.get(name)), None)
    what = "the order of its parameters" if name is None else (
        f"{name} is {here.get(name, 'missing')} on rank 0 and {there.get(name, 'missing')} on rank {rank}"
    )  # fmt: skip
    raise TaskError(
        f"The model differs between ranks: {what}.\n"
        "  Every rank must build the same model: its shape must not depend on the rank or on unseeded random numbers."
    )


@torch.no_grad()
def share_model(model: nn.Module, world: World) -> None:
    """Give every rank the values of rank 0's model. All ranks call it, before the model is sharded."""
    share_values([*model.parameters(), *model.buffers()], world)


@torch.no_grad()
def share_values(tensors: Sequence[Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place. Only tensors whose checksums differ are sent. All ranks call it."""
    whole = [tensor for tensor in tensors if _has_values(tensor)]
    if world.size == 1 or not whole:
        return
    everyone = world.of_all([_checksum(tensor) for tensor in whole])
    for tensor, *checksums in zip(whole, *everyone, strict=True):
        if len(set(checksums)) > 1:
            sent = _plain(tensor).to(_sent_from())
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
            tensor.copy_(sent)


def _sent_from() -> torch.device:
    """Return the CPU where the process group can send from it: a script may have started one with NCCL alone."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _form(tensor: Tensor) -> str:
    return f" of shape {tuple(tensor.shape)} in {tensor.dtype}"


def _has_values(tensor: Tensor) -> bool:
    """Return whether this rank holds the whole of a plain tensor."""
    plain = not isinstance(tensor, DTensor) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_meta and tensor.numel() > 0


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _checksum(tensor: Tensor) -> int:
    plain = _plain(tensor)
    return zlib.crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
