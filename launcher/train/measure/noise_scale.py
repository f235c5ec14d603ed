"""Gradient noise scale: the global batch size up to which larger batches pay off, from gradient norms that each window
provides anyway.

After McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1. The squared
norm of a mean gradient over B samples has the expectation ``|G|^2 + tr(Sigma) / B``, with G the true gradient and Sigma
the covariance of one sample's gradient. Two batch sizes give two equations: the large batch is the window, the small
one is the part that a rank has summed before other ranks' gradients are added. Both unknowns are averaged over windows
(weighted, see _Averages), and only then divided: ``noise/scale = tr(Sigma) / |G|^2``, in samples. The confidence
interval of the quotient follows from the scatter of the windows' estimates: see _Averages.interval.

The norms are computed as follows. A rank holds ``g_r = s / C * sum of its items' gradients`` (C: the engine's constant,
s: the loss scale), so the mean over its n_r items is ``G_r = C / (s * n_r) * g_r``. Weighted by items, the mean over
the ranks ``sum of n_r * |G_r|^2 / sum of n_r`` has the expectation ``|G|^2 + tr(Sigma) / b`` with b samples per rank,
for any distribution of the items. It equals ``(C / s)^2 / sum(n_r) * sum(|g_r|^2 / n_r)``: each rank contributes one
number, which is sent with the next window's totals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.config.schema import Sync
from launcher.plan.sync_policy import REDUCING
from launcher.train.measure.observer import EndedWindow, Observer

# decay of the averages per window: they cover about a hundred windows, over which the scale changes little
SMOOTHING = 0.99
MOST_WEIGHT = 10
# number of measured windows before an estimate is reported
FEWEST_WINDOWS = 10


@dataclass(frozen=True)
class Noise:
    """Estimates from the windows so far.

    Args:
        grad_sq: squared norm of the true gradient, that of an infinitely large batch, |G|^2.
        variance: variance of one sample's gradient, summed over all parameters, tr(Sigma).
        low, high: 95% confidence interval of ``scale``, in samples; ``high`` is infinite if the windows do not exclude
            a true gradient of zero.
    """

    grad_sq: float
    variance: float
    low: float = 0.0
    high: float = math.inf

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None while noise makes one of the two averages zero or negative."""
        return self.variance / self.grad_sq if self.variance > 0 and self.grad_sq > 0 else None


class LocalGradNorm:
    """Norm of this rank's own gradient, taken by the strategy before other ranks' gradients are added.

    It is taken once per window, in the backward pass in which it is ``due``, without blocking the host.
    """

    def __init__(self) -> None:
        self.due = False
        self._norms: list[Tensor] = []

    def clear(self) -> None:
        """Drop what an abandoned window has left."""
        self._norms.clear()

    def take(self, gradients: Sequence[Tensor]) -> None:
        """Add a piece of the gradient, just before it is reduced; ignored unless ``due``."""
        if self.due:
            # one kernel for all wide tensors; norms of half-precision tensors are computed in fp32, one by one
            wide: list[Tensor] = []
            for gradient in gradients:
                if gradient.dtype.itemsize >= 4:
                    wide.append(gradient)
                else:
                    self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
            self._norms += torch._foreach_norm(wide) if wide else ()

    def square(self, device: torch.device) -> Tensor | float | None:
        """Return the squared norm in fp64, and reset it; None if no gradient was taken. The host waits for no GPU."""
        self.due = False
        if not self._norms:
            return None
        norms, self._norms = self._norms, []
        if device.type == "cpu":
            total = 0.0
            for norm in norms:
                total += norm.item() * norm.item()  # ** raises an error where * is inf
            return total
        return torch.stack(norms).detach().to(device, torch.float64).square().sum()


class NoiseScale(Observer):
    """Averages over the windows of a run, the same on all ranks, and this rank's contribution of the last window.

    Args:
        gradient: of this rank.
        random: a rank's part of a window is drawn at random. If not, it says nothing about the noise of one sample's
            gradient, and nothing is measured.
    """

    def __init__(self, ranks: int, device: torch.device, gradient: LocalGradNorm, *, random: bool = True) -> None:
        self._ranks, self._device, self._gradient, self._random = ranks, device, gradient, random
        self._part: tuple[Tensor | float, int] | None = None
        self._waiting: tuple[float, int, int, float] | None = None  # see ``receive``
        self.own: Tensor | float = 0.0  # |g_r|^2 / n_r of the last window, to be summed over the ranks
        self._averages = _Averages()

    def before_backward(
        self, sync: Sync, totals: Callable[[], tuple[Tensor | float, int]], *, first: bool, last: bool
    ) -> None:
        """Take the norm in the backward pass that completes this rank's part of the window: the whole of it under a
        policy that reduces at the boundary, otherwise the first micro-batch, which also stands for it on a single rank.

        Args:
            totals: returns this rank's number of items and of samples in the window so far.
        """
        if not self._random:
            return
        single, each = self._ranks == 1, sync in REDUCING
        self._gradient.due = first and not last if single else first if each else last
        if self._gradient.due:
            self._gradient.clear()
            self._part = totals()

    def contribution(self) -> Sequence[Tensor | float]:
        return [self.own]

    def receive(self, sums: Sequence[float]) -> None:
        waiting, self._waiting, self.own = self._waiting, None, 0.0
        if waiting is None or not math.isfinite(sums[0]):
            return
        # squared norms of the mean gradients over the window, and over a rank's part of it, of so many samples
        large_sq, large, small, factor = waiting
        small_sq = sums[0] * factor
        # unbiased estimates of |G|^2 and tr(Sigma): equations A.2 and A.3 of the paper
        grad_sq = (large * large_sq - small * small_sq) / (large - small)
        self._averages.take_in(large_sq, grad_sq, (small_sq - large_sq) / (1 / small - 1 / large))

    def window_ended(self, window: EndedWindow) -> None:
        square = self._gradient.square(self._device)
        if not window.comparable or square is None or self._part is None or self._part[1] == window.samples:
            return  # with as many samples in the part, both batch sizes would be the same
        own_items, own_samples = self._part
        # all of the window's items if the parts make up the window; otherwise estimated by their share of samples
        items_of_parts = window.items * own_samples * self._ranks / window.samples
        factor = window.gradient_unit**2 / items_of_parts
        self._waiting = window.grad_norm**2, window.samples, own_samples, factor
        # nan on a rank without items, which has no mean gradient: `receive` then drops the window
        if isinstance(square, Tensor) or isinstance(own_items, Tensor):
            self.own = torch.as_tensor(square, dtype=torch.float64) / own_items
        else:
            self.own = square / own_items if own_items else math.nan

    @property
    def estimate(self) -> Noise | None:
        """Estimates from the windows so far; None before there are enough of them."""
        averages = self._averages
        if averages.windows < FEWEST_WINDOWS:
            return None
        return Noise(averages.grad_sq / averages.weight, averages.variance / averages.weight, *averages.interval())

    def metrics(self) -> dict[str, float]:
        """Return the estimates for the record, without ``noise/scale`` if unknown, and ``scale_high`` if infinite."""
        if (noise := self.estimate) is None:
            return {}
        metrics = {"noise/grad_sq": noise.grad_sq, "noise/variance": noise.variance, "noise/scale_low": noise.low}
        if math.isfinite(noise.high):
            metrics["noise/scale_high"] = noise.high
        return metrics if noise.scale is None else metrics | {"noise/scale": noise.scale}

    @property
    def waits(self) -> bool:
        """True while a measured window is not settled."""
        return self._waiting is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as JSON, the same on all ranks. No window may be waiting to be settled."""
        assert not self.waits
        return asdict(self._averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages."""
        self._averages = _Averages(**state)


@dataclass
class _Averages:
    """Weighted averages over the windows.

    The gradient's norm falls by orders of magnitude at the start of a run, so in plain averages the first few windows
    would outweigh a hundred later ones. So each window has the weight 1 / (squared norm of the previous window's
    gradient), which reflects the gradient's size but is independent of this window's noise: the averages stay unbiased.
    A weight is at most MOST_WEIGHT times the average weight: otherwise one window after an almost zero gradient would
    count as much as thousands of others.

    Args:
        windows: number of windows in the averages.
        before_sq: squared norm of the newest window's mean gradient; 0 before there is one.
        weight, grad_sq, variance: averages of the weights, and of the two estimates times their weights.
        grad_sq_2, both, variance_2: averages of the squares and of the product of the latter two.
    """

    windows: int = 0
    before_sq: float = 0.0
    weight: float = 0.0
    grad_sq: float = 0.0
    variance: float = 0.0
    grad_sq_2: float = 0.0
    both: float = 0.0
    variance_2: float = 0.0

    def take_in(self, large_sq: float, grad_sq: float, variance: float) -> None:
        if self.before_sq > 0:
            weight = 1 / self.before_sq
            if self.windows:
                weight = min(weight, MOST_WEIGHT * self.weight / (1 - SMOOTHING**self.windows))
            self.windows += 1
            g, v = weight * grad_sq, weight * variance
            self.weight += (1 - SMOOTHING) * (weight - self.weight)
            self.grad_sq += (1 - SMOOTHING) * (g - self.grad_sq)
            self.variance += (1 - SMOOTHING) * (v - self.variance)
            self.grad_sq_2 += (1 - SMOOTHING) * (g * g - self.grad_sq_2)
            self.both += (1 - SMOOTHING) * (g * v - self.both)
            self.variance_2 += (1 - SMOOTHING) * (v * v - self.variance_2)
        self.before_sq = large_sq

    def interval(self) -> tuple[float, float]:
        """Return the 95% confidence interval of the scale, in samples, at least 0; from two windows on.

        It contains each quotient R that the windows do not exclude (Fieller, "Some Problems in Interval Estimation",
        1954): each R for which the average of v - R g, whose expectation is 0 at the true R, is at most t standard
        errors from 0. A normal interval around the quotient would be wrong if the average of g is close to 0. The
        standard error is that of an average with unequal weights: a fraction of the windows' scatter that depends only
        on their number.
        """
        mass = 1 - SMOOTHING**self.windows  # sum of the weights (1 - s) s^i of the windows, newest first
        share = (1 - SMOOTHING) / (1 + SMOOTHING) * (1 + SMOOTHING**self.windows) / mass  # 1 / effective windows
        g, v = self.grad_sq / mass, self.variance / mass
        t_sq = _student(1 / share - 1) ** 2 * share / (1 - share)
        # (v - R g)^2 <= t^2 Var(v - R g), a quadratic in R: a R^2 - 2 b R + c <= 0
        a = g * g - t_sq * max(0.0, self.grad_sq_2 / mass - g * g)
        b = g * v - t_sq * (self.both / mass - g * v)
        c = v * v - t_sq * max(0.0, self.variance_2 / mass - v * v)
        if not all(map(math.isfinite, (a, b, c))):
            return 0.0, math.inf
        if a > 0:
            root = math.sqrt(max(0.0, b * b - a * c))
            return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
        # g = 0 is not excluded: the interval is unbounded, possibly except for the values between the two roots
        if a == 0 or b * b <= a * c:
            return 0.0, math.inf
        root = math.sqrt(b * b - a * c)
        low, high = (b + root) / a, (b - root) / a
        return (max(0.0, high) if low <= 0 else 0.0), math.inf


def _student(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution, by the Cornish-Fisher expansion around the normal one."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
