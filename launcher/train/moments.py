"""What a BatchNorm computes, in parts that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class Statistics:
    """What a layer normalises by. ``count``: numbers a channel; ``mean`` and ``variance`` (of these numbers, not
    corrected): [channels], fp64."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of_sums(cls, sums: Tensor) -> Statistics:
        """``sums``: [2 * channels + 1] as ``sums_of`` has them. Of no sample at all: those that change nothing."""
        count = sums[-1]
        mean, square = sums[:-1].view(2, -1) / count.clamp(min=1)
        variance = torch.where(count > 0, (square - mean * mean).clamp(min=0), 1.0)
        return cls(count, mean, variance)


def sums_of(x: Tensor, *, counts: bool) -> Tensor:
    """Sum, sum of squares and count a channel, [2 * channels + 1] in fp64: these add up over micro-batches and ranks.
    Zero where the samples do not count. The squares are put together from a variance, so that a large mean
    does not swallow it."""
    if not counts:
        return torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // x.shape[1]
    variance, mean = (value.double() for value in torch.var_mean(widened(x), _all_but_channels(x), correction=0))
    number = torch.full((1,), count, dtype=torch.float64, device=x.device)
    return torch.cat((count * mean, count * (variance + mean * mean), number))


def widened(x: Tensor) -> Tensor:
    """In the format in which it is normalised: at least fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """[channels] as it spreads over ``x``, [samples, channels, ...], in its format."""
    return value.to(x.dtype).view(1, -1, *[1] * (x.ndim - 2))


def gradient_sums(gradient: Tensor, normalised: Tensor) -> Tensor:
    """Sum of the gradient, and of the gradient times what it is of: [2, channels] in fp64."""
    dims = _all_but_channels(gradient)
    return torch.stack((gradient.sum(dims), (gradient * normalised).sum(dims))).double()


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), with the gradient that reaches x through the statistics too.

    With g the gradient of the result y, and means over all that the statistics are of, the gradient of x is
    (g - mean(g) - y * mean(g * y)) / sqrt(variance + eps): Ioffe & Szegedy 2015, section 3. ``means`` turns the two
    sums of this call into these two means, [2, channels]; it is None where x has no part in the statistics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, statistics: Statistics, eps: float, means: Callable[[Tensor], Tensor] | None):
        scale = per_channel((statistics.variance + eps).rsqrt(), x)
        y = (x - per_channel(statistics.mean, x)) * scale
        ctx.save_for_backward(y, scale)
        ctx.means = means
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        y, scale = ctx.saved_tensors
        if ctx.means is not None:
            of_gradient, of_product = ctx.means(gradient_sums(gradient, y))
            gradient = gradient - per_channel(of_gradient, y) - y * per_channel(of_product, y)
        return gradient * scale, None, None, None


def normalise(layer: _BatchNorm, x: Tensor, statistics: Statistics, means: Callable[[Tensor], Tensor] | None) -> Tensor:
    return Normalise.apply(widened(x), statistics, layer.eps, means)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def track(layer: _BatchNorm, statistics: Statistics) -> None:
    """Let the running statistics follow, once; nothing without samples."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    seen = statistics.count > 0
    layer.num_batches_tracked += seen
    # without a momentum they are the average of all so far
    so_far = layer.num_batches_tracked.clamp(min=1).double()
    part = seen.double() * (1 / so_far if layer.momentum is None else layer.momentum)
    unbiased = statistics.variance * statistics.count / (statistics.count - 1).clamp(min=1)
    for running, new in ((layer.running_mean, statistics.mean), (layer.running_var, unbiased)):
        running.copy_((1 - part) * running + part * new)
