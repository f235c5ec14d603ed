"""Checksums of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.train.parallel.checksum import checksum


def test_a_checksum_depends_on_each_bit_and_its_position() -> None:
    torch.manual_seed(0)
    for dtype, size in ((torch.float32, 5000), (torch.bfloat16, 4099), (torch.float64, 1), (torch.uint8, 7)):
        tensor = (torch.randn(size) * 50).to(dtype)
        changed = [tensor.clone() for _ in range(4)]
        bits = [each.view(torch.uint8) for each in changed]
        bits[1][-1] ^= 1
        bits[2][0] ^= 128
        changed[3] = tensor.flip(0) if size > 1 else tensor + 1
        sums = [_sum(each) for each in changed]
        assert sums[0] == _sum(tensor)
        assert len({*sums}) == 4, dtype
    table = torch.arange(4096.0).reshape(4, 1024)
    exchanged = [table[[1, 0, 2, 3]], table.roll(1, 1), table.roll(1, 0), table.flip(0, 1)]
    assert len({_sum(table), *map(_sum, exchanged)}) == 5
    whole = torch.randn(101)
    assert _sum(whole[1:]) == _sum(whole[1:].clone()), "wherever the tensor begins in memory"
    assert _sum(torch.zeros(3, 0)) == 0


def _sum(tensor: Tensor) -> int:
    return int(checksum(tensor).item())
