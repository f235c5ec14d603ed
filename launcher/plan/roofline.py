"""Roofline: seconds of an operator on a GPU that is not at hand, from its data sheet and stated efficiencies.

An operator takes the time of its arithmetic or that of its memory traffic, whichever is longer (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", 2009), and no less than a kernel needs at all. No figure
of this module is fitted to a run of the launcher. docs/explanations/forecasts.md compares the results with published
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.config.schema import PrecisionKind
from launcher.plan.gpus import Gpu


class OperatorKind(StrEnum):
    """Kind of operator.

    Attributes:
        product: matrix product or convolution.
        attention: fused attention.
        memory: everything else: bound by memory traffic.
    """

    product = "product"
    attention = "attention"
    memory = "memory"


@dataclass(frozen=True)
class Operator:
    """Work of one operator.

    Attributes:
        dtype: format that a product or an attention computes in; fp32 for all others.
        flops: floating-point operations that are executed, two for each multiply-add; 0 for ``memory``.
        read_bytes, written_bytes: memory traffic, each tensor once.
    """

    kind: OperatorKind
    dtype: PrecisionKind
    flops: int
    read_bytes: int
    written_bytes: int


# Share of the peak that the best shapes of matrix products reach: 794.5 of 989 TFLOP/s in bf16 on H100 and H200, 1745
# of 2250 on B200 (Bekman, "Machine Learning Engineering Open Book", maximum achievable matmul FLOPS).
BEST_SHARE = 0.8
# (FLOPs of a product, share of that best rate): calculon-ai/calculon, systems/a100_80g.json (Isaev et al., "Calculon: a
# methodology and tool for high-level codesign of systems and large language models", 2023). Linear in between, in
# the logarithm of the size.
PRODUCT_SHARES = ((1e8, 0.1), (1e9, 0.6), (16e9, 0.9), (128e9, 0.95))
# (bytes of an operator, share of the memory's bandwidth): the same file
MEMORY_SHARES = ((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))
# FlashAttention-2, which torch's scaled_dot_product_attention runs, reaches 50 to 73% of an A100's peak, and up to 335
# TFLOP/s on an H100, whose newer instructions it does not use (Dao, "FlashAttention-2", 2023, abstract, section 4.1).
ATTENTION_SHARE, ATTENTION_FLOPS = 0.6, 330e12
# Least time of a kernel: 2 to 5 us from launch to end on a GPU that is busy (NVIDIA technical blog, "Getting started
# with CUDA graphs", 2019: 3.8 us for each short kernel of a stream).
KERNEL_S = 3.8e-6
# relative half width of a 90% interval of the time of a whole pass: the misses in docs/explanations/forecasts.md
ROOFLINE_ERROR = 0.2


@dataclass(frozen=True)
class Roofline:
    """Rates of a device.

    Attributes:
        peaks: peak FLOP/s by the format of a product.
        bytes_per_s: bandwidth of the memory.
    """

    peaks: dict[PrecisionKind, float]
    bytes_per_s: float

    @classmethod
    def of(cls, gpu: Gpu, *, tf32: bool) -> Roofline:
        """Return the rates of a GPU of the table.

        Args:
            tf32: fp32 matrix products and convolutions run in TF32.
        """
        fp32 = gpu.flops(PrecisionKind.fp32, tf32=tf32) or 0.0
        peaks = {kind: gpu.flops(kind, tf32=tf32) or fp32 for kind in PrecisionKind if kind is not PrecisionKind.auto}
        return cls(peaks, gpu.memory_gb_s * 1e9)

    @classmethod
    def unknown(cls) -> Roofline:
        """Return rates in proportions that are usual, for a device that the table does not have."""
        return cls(dict.fromkeys(PrecisionKind, 1e14), 1e12)

    def seconds(self, operator: Operator) -> float:
        traffic = operator.read_bytes + operator.written_bytes
        memory_s = traffic / (self.bytes_per_s * _interpolated(MEMORY_SHARES, traffic))
        peak = self.peaks[operator.dtype]
        if operator.kind is OperatorKind.product:
            compute_s = operator.flops / (peak * BEST_SHARE * _interpolated(PRODUCT_SHARES, operator.flops))
        elif operator.kind is OperatorKind.attention:
            compute_s = operator.flops / min(peak * ATTENTION_SHARE, ATTENTION_FLOPS)
        else:
            compute_s = 0.0
        return max(memory_s, compute_s, KERNEL_S)


def _interpolated(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return the share at ``size``; outside of the table, that of its nearest end."""
    (low, share), *rest = table
    if size <= low:
        return share
    for high, next_share in rest:
        if size < high:
            return share + (next_share - share) * math.log(size / low) / math.log(high / low)
        low, share = high, next_share
    return share
