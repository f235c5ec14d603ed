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
    def sent_bytes(self) -> int:
        return self.nbytes if self.codes is None else self.numel + self.blocks * _SCALE_BYTES


def part_of(numel: int, dtype: torch.dtype, dimensions: int, codes: torch.dtype | None) -> Part:
    """Return the part of a parameter: sent as ``codes`` if it is a matrix of numbers wider than a byte."""
    matrix = dimensions >= 2 and dtype.is_floating_point and dtype.itemsize > 1
    return Part(numel, dtype, codes if matrix else None)


class Row:
    """Codec of one shard unit's row: the numbers that one rank sends to one other, parameter after parameter.

    A row is sent as the scales, then the codes, then all that is not quantised.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._quantised: list[tuple[Part, int, int]] = []  # with the places of its bytes, and among padded numbers
        self._exact: list[tuple[Part, int]] = []
        place = blocks = 0
        for part in parts:
            if part.codes is None:
                self._exact.append((part, place))
            else:
                self._quantised.append((part, place, blocks * BLOCK))
            place += part.nbytes
            blocks += part.blocks
        self.nbytes, self._blocks = place, blocks
        self.sent_bytes = sum(part.sent_bytes for part in parts)
        formats = {part.codes for part, *_ in self._quantised if part.codes is not None}
        self._codes = formats.pop() if formats else torch.int8
        wide = any(part.dtype == torch.float64 for part, *_ in self._quantised)
        self._wide = torch.float64 if wide else torch.float32

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes of ``rows`` [n, numbers]: [n, sent_bytes] in uint8."""
        data = rows.view(torch.uint8)
        padded = torch.zeros(len(data), self._blocks * BLOCK, dtype=self._wide, device=data.device)
        for part, place, number in self._quantised:
            padded[:, number : number + part.numel] = _numbers(data, place, part)
        largest = _LARGEST[self._codes]
        scales, scaled = scale_blocks(padded.view(len(data), -1, BLOCK), largest)
        del padded
        if self._codes is torch.int8:
            scaled.round_()
        codes = scaled.clamp_(-largest, largest).to(self._codes).view(torch.uint8).flatten(1)
        return torch.cat(
            [
                scales.view(torch.uint8),
                *(codes[:, number : number + part.numel] for part, _, number in self._quantised),
                *(data[:, place : place + part.nbytes] for part, place in self._exact),
            ],
            dim=1,
        )

    def decode(self, sent: Tensor, rows: Tensor) -> None:
        """Write the numbers of the bytes ``sent`` [n, sent_bytes] to ``rows`` [n, numbers]."""
        data = rows.view(torch.uint8)
        at = self._blocks * _SCALE_BYTES
        scales = sent[:, :at].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = torch.zeros(len(data), self._blocks * BLOCK, dtype=torch.uint8, device=data.device)
        for part, _, number in self._quantised:
            codes[:, number : number + part.numel] = sent[:, at : at + part.numel]
            at += part.numel
        wide = codes.view(self._codes).to(self._wide).view(len(data), -1, BLOCK)
        numbers = wide.mul_(scales.to(self._wide).unsqueeze(2)).flatten(1)
        for part, place, number in self._quantised:
            values = numbers[:, number : number + part.numel].to(part.dtype).contiguous()
            data[:, place : place + part.nbytes] = values.view(torch.uint8)
        for part, place in self._exact:
            data[:, place : place + part.nbytes] = sent[:, at : at + part.nbytes]
            at += part.nbytes


def _numbers(data: Tensor, place: int, part: Part) -> Tensor:
    """Return the numbers of ``part`` in rows of bytes. Beside parameters of other formats they may be unaligned."""
    found = data[:, place : place + part.nbytes]
    width = part.dtype.itemsize
    if found.storage_offset() % width or data.stride(0) % width:
        found = found.clone(memory_format=torch.contiguous_format)
    return found.view(part.dtype)


@functools.cache
def row_of(parts: tuple[Part, ...]) -> Row | None:
    """Return the codec of a row; None if nothing in it is quantised."""
    return Row(parts) if any(part.codes is not None for part in parts) else None


def gathered_row(parameters: Sequence[Any], codes: torch.dtype | None) -> Row | None:
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


def reduced_row(parameters: Sequence[Any], codes: torch.dtype | None) -> Row | None:
    """Return the codec of what one rank sends to one other when the group's gradients are reduced, in fp32."""
    trained = (each for each in parameters if each.sharded_param.requires_grad)
    return row_of(
        tuple(
            part_of(each._sharded_param_data.numel(), torch.float32, each.sharded_param.ndim, codes) for each in trained
        )
    )


def quantised(tensor: Tensor, ranks: int, codes: torch.dtype | None) -> Tensor:
    """Return ``tensor`` as it is received if each of ``ranks`` ranks sends one shard of it."""
    rows = math.ceil(tensor.shape[0] / ranks) if tensor.ndim else 1
    part = part_of(rows * tensor.shape[1:].numel(), tensor.dtype, tensor.ndim, codes)
    if part.codes is None:
        return tensor
    whole = tensor.new_zeros(ranks, part.numel)
    whole.view(-1)[: tensor.numel()] = tensor.flatten()
    row = Row([part])
    row.decode(row.encode(whole), whole)
    return whole.view(-1)[: tensor.numel()].view_as(tensor)
