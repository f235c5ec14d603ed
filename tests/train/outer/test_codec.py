"""Codecs of outer gradients."""

from __future__ import annotations

import pytest
import torch

from launcher.config.choices import OuterCompress
from launcher.train.outer.codec import BLOCK, decode, encode


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("compress", "levels"), [("none", None), ("int8", 127), ("int4", 7)])
def test_error_is_at_most_half_a_level_of_the_block(dtype: torch.dtype, compress: str, levels: int | None) -> None:
    kind = OuterCompress(compress)
    numbers = torch.randn(16 * max(BLOCK[kind], 4), dtype=dtype) * torch.logspace(-20, 3, 16).repeat_interleave(
        max(BLOCK[kind], 4)
    ).to(dtype)
    back = decode(encode(numbers, kind), kind, len(numbers), dtype)
    assert back.dtype == dtype
    if levels is None:
        assert torch.equal(back, numbers)
        return
    blocks = numbers.view(-1, BLOCK[kind])
    bound = blocks.abs().amax(1, keepdim=True) / levels * 0.50001
    assert ((back.view_as(blocks) - blocks).abs() <= bound).all()


def test_topk_sends_the_largest_of_each_block() -> None:
    numbers = torch.randn(2 * 4096)
    back = decode(encode(numbers, OuterCompress.topk), OuterCompress.topk, len(numbers), torch.float32)
    for sent, block in zip(back.view(2, -1), numbers.view(2, -1), strict=True):
        chosen = block.abs().topk(64).indices
        assert set(sent.nonzero().flatten().tolist()) <= set(chosen.tolist())
        torch.testing.assert_close(sent[chosen], block[chosen], rtol=0.02, atol=block.abs().max().item() / 250)


@pytest.mark.parametrize("compress", OuterCompress)
def test_zeros_stay_zeros(compress: OuterCompress) -> None:
    numbers = torch.zeros(2 * BLOCK[compress])
    assert torch.equal(decode(encode(numbers, compress), compress, len(numbers), torch.float32), numbers)


@pytest.mark.parametrize("compress", OuterCompress)
def test_a_rank_may_hold_nothing_of_a_fragment(compress: OuterCompress) -> None:
    assert decode(encode(torch.zeros(0), compress), compress, 0, torch.float32).shape == (0,)
