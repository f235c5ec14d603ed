"""Roofline: an operator takes the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

import pytest

from launcher.config.schema import PrecisionKind
from launcher.plan.gpus import find_gpu
from launcher.plan.roofline import KERNEL_S, Operator, OperatorKind, Roofline

H100 = Roofline.of(find_gpu("h100"), tf32=False)
BF16, FP32 = PrecisionKind.bf16, PrecisionKind.fp32


def product(size: int, dtype: PrecisionKind = BF16) -> Operator:
    return Operator(OperatorKind.product, dtype, 2 * size**3, 2 * 2 * size**2, 2 * size**2)


def test_a_large_product_runs_at_the_stated_share_of_the_peak() -> None:
    assert H100.seconds(product(8192)) == pytest.approx(2 * 8192**3 / (989.4e12 * 0.8 * 0.95))
    assert H100.seconds(product(8192, FP32)) == pytest.approx(2 * 8192**3 / (66.9e12 * 0.8 * 0.95))
    tf32 = Roofline.of(find_gpu("h100"), tf32=True)
    assert tf32.seconds(product(8192, FP32)) == pytest.approx(2 * 8192**3 / (494.7e12 * 0.8 * 0.95))


def test_attention_does_not_profit_from_a_faster_product() -> None:
    attention = Operator(OperatorKind.attention, BF16, 10**13, 10**6, 10**6)
    assert H100.seconds(attention) == pytest.approx(1e13 / 330e12)
    a100 = Roofline.of(find_gpu("a100"), tf32=False)
    assert a100.seconds(attention) == pytest.approx(1e13 / (0.6 * 312e12))


def test_other_operators_take_the_time_of_their_bytes_and_no_less_than_a_kernel() -> None:
    large = Operator(OperatorKind.memory, FP32, 0, 2 * 10**9, 10**9)
    assert H100.seconds(large) == pytest.approx(3e9 / (3350e9 * 0.9))
    assert H100.seconds(Operator(OperatorKind.memory, FP32, 0, 4, 4)) == KERNEL_S


def test_larger_operators_take_longer() -> None:
    for sizes in ([2**n for n in range(4, 15)],):
        times = [H100.seconds(product(size)) for size in sizes]
        assert times == sorted(times)
    times = [H100.seconds(Operator(OperatorKind.memory, FP32, 0, 10**n, 0)) for n in range(2, 11)]
    assert times == sorted(times)
