"""Blockwise quantisation of what FSDP sends: one byte for each number, and a scale for each block of 256.

A rank's shard of a parameter with two or more dimensions (a matrix) is divided into blocks of 256 consecutive numbers;
the last block may be shorter. A block is sent as its scale, the largest magnitude divided by 127 (int8) or 448 (float8,
e4m3), in fp32, and each number divided by the scale and rounded. Vectors (biases, norms) are few, and their errors
weigh more: they are sent as they are, as by Markov et al. (2023). Of a block with an inf or a nan, every number is inf
or nan when it is received.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from launcher.config.choices import Compress, GatherFormat
from launcher.plan.run_plan import StrategyPlan

BLOCK = 256
_SCALE_BYTES = 4
_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def code_dtypes(strategy: StrategyPlan) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the formats in which a sharded model's parameters and gradients are sent; None: as they are."""
    gathered = {GatherFormat.int8: torch.int8, GatherFormat.float8: torch.float8_e4m3fn}
    return gathered.get(strategy.compress_parameters), torch.int8 if strategy.compress is Compress.int8 else None


def scale_blocks(blocks: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block (last dimension) in fp32, and the blocks divided by it: at most ``largest``, up to
    rounding."""
    scales = (blocks.abs().amax(dim=-1) / largest).float()
    divisor = torch.where(scales > 0, scales, 1).to(blocks.dtype)
    return scales, blocks / divisor.unsqueeze(-1)


@dataclass(frozen=True)
class Part:
    """One parameter's numbers within a row.

    Args:
        dtype: format before it is sent, and after it is received.
        codes: format in which it is sent; None: ``dtype``.
    """

    numel: int
    dtype: torch.dtype
    codes: torch.dtype | None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def blocks(self) -> int:
        return 0 if self.codes is None else math.ceil(self.numel / BLOCK)

    @property
    def wide(self) -> torch.dtype:
        """Return the format in which numbers are scaled."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def sent_bytes(self) -> int:
        return self.nbytes if self.codes is None else self.numel + self.blocks * _SCALE_BYTES


def part_of(numel: int, dtype: torch.dtype, dimensions: int, codes: torch.dtype | None) -> Part:
    """Return the part of a parameter: sent as ``codes`` if it is a matrix of numbers wider than a byte."""
    matrix = dimensions >= 2 and dtype.is_floating_point and dtype.itemsize > 1
    return Part(numel, dtype, codes if matrix else None)


class RowCodec:
    """Codec of one shard unit's row: the numbers that one rank sends to one other, parameter after parameter.

    A quantised part is sent as its scales, then its codes. The parts are converted one by one, which needs less memory
    than all at once.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)
        self.sent_bytes = sum(part.sent_bytes for part in parts)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of ``rows`` [n, numbers]: [n, sent_bytes] in uint8."""
        data, pieces, place = rows.view(torch.uint8), list[Tensor](), 0
        for part in self._parts:
            found = data[:, place : place + part.nbytes]
            place += part.nbytes
            if part.codes is None:
                pieces.append(found)
                continue
            if not _is_aligned(found, part.dtype):
                found = found.clone(memory_format=torch.contiguous_format)
            largest = _LARGEST[part.codes]
            numbers = found.view(part.dtype).to(part.wide)
            scales, scaled = scale_blocks(_in_blocks(numbers), largest)
            if part.codes is torch.int8:
                scaled.round_()
            codes = scaled.clamp_(-largest, largest).to(part.codes)
            pieces += [scales.view(torch.uint8), codes.view(torch.uint8).flatten(1)[:, : part.numel]]
        return torch.cat(pieces, dim=1)

    def decode(self, sent: Tensor, rows: Tensor) -> None:
        """Write the numbers of the bytes ``sent`` [n, sent_bytes] to ``rows`` [n, numbers]."""
        data, at, place = rows.view(torch.uint8), 0, 0
        for part in self._parts:
            target, found = data[:, place : place + part.nbytes], sent[:, at : at + part.sent_bytes]
            place += part.nbytes
            at += part.sent_bytes
            if part.codes is None:
                target.copy_(found)
                continue
            head = part.blocks * _SCALE_BYTES
            scales = found[:, :head].clone(memory_format=torch.contiguous_format).view(torch.float32)
            numbers = _in_blocks(found[:, head:]).view(part.codes).to(part.wide)
            numbers = numbers.mul_(scales.unsqueeze(2)).flatten(1)[:, : part.numel]
            if _is_aligned(target, part.dtype):
                target.view(part.dtype).copy_(numbers)
            else:
                target.copy_(numbers.to(part.dtype).contiguous().view(torch.uint8))


def _in_blocks(rows: Tensor) -> Tensor:
    """Return ``rows`` [n, numbers] as [n, blocks, BLOCK], the last block filled up with zeros."""
    missing = -rows.shape[1] % BLOCK
    return (functional.pad(rows, (0, missing)) if missing else rows).reshape(len(rows), -1, BLOCK)


def _is_aligned(data: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows of bytes can be viewed as ``dtype``. Beside parameters of other formats they may not."""
    return data.storage_offset() % dtype.itemsize == 0 and data.stride(0) % dtype.itemsize == 0


@functools.cache
def row_of(parts: tuple[Part, ...]) -> RowCodec | None:
    """Return the codec of a row; None if nothing in it is quantised."""
    return RowCodec(parts) if any(part.codes is not None for part in parts) else None


def gathered_row(parameters: Sequence[Any], codes: torch.dtype | None) -> RowCodec | None:
    """Return the codec of what one rank sends when a group of torch's FSDP parameters is gathered."""
    return row_of(
        tuple(
            part_of(
                each._sharded_param_data.numel(),
                each.param_dtype or each.sharded_param.dtype,
                each.sharded_param.ndim,
                codes,
            )
            for each in parameters
        )
    )


def reduced_row(parameters: Sequence[Any], codes: torch.dtype | None) -> RowCodec | None:
    """Return the codec of what one rank sends to one other when the group's gradients are reduced, in fp32."""
    trained = (each for each in parameters if each.sharded_param.requires_grad)
    return row_of(
        tuple(
            part_of(each._sharded_param_data.numel(), torch.float32, each.sharded_param.ndim, codes) for each in trained
        )
    )


def quantised(tensor: Tensor, ranks: int, codes: torch.dtype | None) -> Tensor:
    """Return ``tensor`` as it is received if each of ``ranks`` ranks sends one shard of it; one rank sends nothing."""
    rows = math.ceil(tensor.shape[0] / ranks) if tensor.ndim else 1
    part = part_of(rows * tensor.shape[1:].numel(), tensor.dtype, tensor.ndim, codes)
    if part.codes is None or ranks == 1:
        return tensor
    whole = tensor.new_zeros(ranks, part.numel)
    whole.view(-1)[: tensor.numel()] = tensor.flatten()
    row = RowCodec([part])
    row.decode(row.encode(whole), whole)
    return whole.view(-1)[: tensor.numel()].view_as(tensor)
