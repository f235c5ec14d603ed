"""Checksums of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from launcher.train.parallel.base import local

# 64-bit words of a row; a row's sum and a column's sum need little memory beside the tensor
_ROW = 1024
BITS = (1 << 62) - 1  # of a checksum, whose negative is an int64 too
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # odd


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number of 62 bits for the bit pattern of this rank's part of a tensor, as a tensor on its device.

    Values are weighted by their position, so that a permutation is noticed.
    """
    data = local(tensor).detach()
    if data.layout != torch.strided or not data.numel():
        return torch.zeros((), dtype=torch.int64, device=data.device)
    data = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.storage_offset() * data.itemsize % 8:  # cannot be read as 64-bit words
        data = data.clone()
    octets = data.view(torch.uint8)
    words = octets[: len(octets) // 8 * 8].view(torch.int64)
    table = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    parts = [table.sum(0), table.sum(1), words[table.numel() :], octets[len(words) * 8 :].long()]
    return (_mixed(parts) & BITS).squeeze()


def _mixed(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum over all numbers, each times an odd number that depends on its position."""
    numbers = torch.cat([*parts])
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * _MIX[0]
    weights = ((weights ^ (weights >> 29)) * _MIX[1]) | 1
    mixed = numbers * weights
    return ((mixed ^ (mixed >> 32)) * _MIX[2]).sum()
