"""Codecs of outer gradients: numbers to bytes and back.

A vector is divided into blocks, each with its own scale, so that one large number does not take the precision of all:
int8: 256 numbers, round(x / max|x| * 127); int4: 64 numbers, round(x / max|x| * 7), two to a byte; topk: of 4,096
numbers the 64 largest (1.56%), each with its position in two bytes and its value as in int8. Scales are fp32.
launcher/plan/outer.py has the bytes of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.config.choices import OuterCompress
from launcher.train.parallel.block_codec import scale_blocks

BLOCK = {OuterCompress.none: 1, OuterCompress.int8: 256, OuterCompress.int4: 64, OuterCompress.topk: 4096}
_LARGEST = 64  # numbers that topk sends of a block


def encode(numbers: Tensor, compress: OuterCompress) -> Tensor:
    """Return the bytes (uint8) for a vector, whose length is a multiple of ``BLOCK``."""
    if compress is OuterCompress.none:
        return numbers.contiguous().view(torch.uint8)
    blocks = numbers.view(-1, BLOCK[compress])
    if compress is OuterCompress.topk:
        positions = blocks.abs().topk(_LARGEST, dim=1).indices
        scales, levels = _levels(blocks.gather(1, positions), 127)
        return _bytes(scales, positions.to(torch.int16), levels)
    if compress is OuterCompress.int8:
        return _bytes(*_levels(blocks, 127))
    scales, levels = _levels(blocks, 7)
    nibbles = (levels + 8).view(torch.uint8)
    return _bytes(scales, nibbles[:, ::2] | (nibbles[:, 1::2] << 4))


def decode(data: Tensor, compress: OuterCompress, length: int, dtype: torch.dtype) -> Tensor:
    """Return the vector of ``length`` numbers for the bytes that ``encode`` has returned."""
    if compress is OuterCompress.none:
        return data.view(dtype)
    if not length:
        return torch.zeros(0, dtype=dtype, device=data.device)
    count = length // BLOCK[compress]
    scales, rest = data[: 4 * count].view(torch.float32).to(dtype).unsqueeze(1), data[4 * count :]
    if compress is OuterCompress.int8:
        return (rest.view(torch.int8).view(count, -1) * scales).flatten()
    if compress is OuterCompress.int4:
        pairs = rest.view(count, -1)
        nibbles = torch.stack([pairs & 15, pairs >> 4], dim=2).view(count, -1)
        return ((nibbles.to(torch.int8) - 8) * scales).flatten()
    split = 2 * _LARGEST * count
    positions = rest[:split].view(torch.int16).view(count, -1).long()
    values = rest[split:].view(torch.int8).view(count, -1) * scales
    return torch.zeros(count, BLOCK[compress], dtype=dtype, device=data.device).scatter_(1, positions, values).flatten()


def _levels(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block in fp32, and its numbers in whole multiples of it, as int8."""
    scales, scaled = scale_blocks(blocks, most)
    return scales, scaled.round_().clamp_(-most, most).to(torch.int8)


def _bytes(*parts: Tensor) -> Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
