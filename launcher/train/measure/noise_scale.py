"""The gradient noise scale: how large a global batch is worth its samples, from norms that a window leaves anyway.

After McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1. The squared
norm of a mean gradient over B samples is expected to be ``|G|^2 + tr(Sigma) / B``, with G the true gradient and Sigma
the covariance of one sample's. Two sizes of batch are two equations: the large one is the window, the small one what a
rank has summed by itself before any other rank's gradient was added. Both unknowns are averaged over windows (weighted,
see _Averages), and only then divided: ``noise/scale = tr(Sigma) / |G|^2``, in samples. How well the quotient is known
follows from how far the windows' estimates scatter: see _Averages.interval.

What the norms are of: a rank's gradient lies there as ``g_r = s / C * sum of its items' gradients`` (C the engine's
divisor, s the loss scale), so the mean over its n_r items is ``G_r = C / (s * n_r) * g_r``. A rank with more items
knows more: ``sum of n_r * |G_r|^2 / sum of n_r``, over the ranks, has the expectation ``|G|^2 + tr(Sigma) / b`` with b
samples a rank, however the items are shared out. That is ``(C / s)^2 / sum(n_r) * sum(|g_r|^2 / n_r)``: each rank has
one number to share, and it travels with the next window's flags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# of the averages a window: they remember the last hundred or so, over which training changes the scale little
SMOOTHING = 0.99
MOST_WEIGHT = 10
# windows that must have been measured before anything is said
FEWEST_WINDOWS = 10


@dataclass(frozen=True)
class Noise:
    """Estimates from the windows so far.

    Args:
        grad_sq: squared norm of the gradient that an endless batch would have, |G|^2.
        variance: of one sample's gradient, summed over all parameters, tr(Sigma).
        low, high: samples between which ``scale`` lies with 95% confidence; ``high`` is infinite where the windows do
            not exclude a true gradient of zero.
    """

    grad_sq: float
    variance: float
    low: float = 0.0
    high: float = math.inf

    @property
    def scale(self) -> float | None:
        """Samples; None while the noise leaves one of the two averages below zero."""
        return self.variance / self.grad_sq if self.variance > 0 and self.grad_sq > 0 else None


class OwnGradient:
    """The norm of this rank's own gradient, taken where a strategy holds it: no other rank's has been added yet.

    That is once a window, and the host does not wait for it. Under a policy that reduces at the boundary it is the
    gradient of the rank's whole window, else of its first micro-batch. ``due``: whether the micro-batch under way
    completes that part.
    """

    def __init__(self) -> None:
        self.due = False
        self._norms: list[Tensor] = []

    def await_part(self, *, due: bool) -> None:
        self.due = due
        if due:
            self._norms.clear()

    def take(self, gradients: Sequence[Tensor]) -> None:
        """``gradients``: a piece of it, as it is about to be sent."""
        if self.due:
            # one kernel for many of them; of half-precision numbers each in fp32
            wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
            narrow = [gradient for gradient in gradients if gradient.dtype.itemsize < 4]
            self._norms += torch._foreach_norm(wide) if wide else ()
            self._norms += [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in narrow]

    def square(self, device: torch.device) -> Tensor | None:
        """Its squared norm: float64 scalar; None where no gradient was about to be sent."""
        if not self._norms:
            return None
        norms, self._norms = self._norms, []
        return torch.stack(norms).detach().to(device, torch.float64).square().sum()


class NoiseScale:
    """Averages over the windows of a run, alike on all ranks; and this rank's own share of what the last one says."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._part: tuple[Tensor | float, int] | None = None
        self._waiting: _Measured | None = None
        self.own: Tensor | float = 0.0  # |g_r|^2 / n_r of the last window, to be added up over the ranks
        self._averages = _Averages()

    def begin(self, items: Tensor | float, samples: int) -> None:
        """This rank's part of the window has so many."""
        self._part = items, samples

    def measure(self, gradient: OwnGradient, grad_norm: float, items: int, samples: int, unit: float) -> None:
        """A full window was applied: all ranks' parts of it are of one size.

        Args:
            gradient: this rank's own.
            grad_norm: of the window's mean gradient; items, samples: of the window, on all ranks.
            unit: C / s, by which the gradient of a sum lies there too small.
        """
        square = gradient.square(self._device)
        if square is None or self._part is None or self._part[1] == samples:  # nobody to compare with
            return
        own_items, own_samples = self._part
        # all of the window's items where the parts make it up; of first micro-batches what their samples' share is
        items_of_parts = items * own_samples * self._ranks / samples
        self._waiting = _Measured(grad_norm**2, samples, own_samples, unit**2 / items_of_parts)
        # 0 / 0 where a rank has no item: it has no mean gradient then, and the window says nothing
        self.own = square / own_items

    def settle(self, shared: float) -> None:
        """``shared``: what ``own`` comes to over all ranks."""
        window, self._waiting, self.own = self._waiting, None, 0.0
        if window is not None and math.isfinite(shared):
            self._averages.take_in(window.large_sq, *window.estimates(shared))

    @property
    def now(self) -> Noise | None:
        """None before there are enough windows."""
        return self._averages.noise

    @property
    def waits(self) -> bool:
        """Whether a window is not settled yet."""
        return self._waiting is not None

    def state_dict(self) -> dict[str, Any]:
        """As JSON has it, and alike on all ranks: nothing waits."""
        assert not self.waits
        return asdict(self._averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Averages of an earlier version, without the squares, are dropped: they have no interval."""
        known = state.keys() == asdict(self._averages).keys()
        self._averages = _Averages(**state) if known else _Averages()


@dataclass(frozen=True)
class _Measured:
    """A window whose ranks' shares are not added up yet.

    Args:
        large_sq: squared norm of the window's mean gradient.
        large, small: samples in the window, and in a rank's part of it.
        factor: what makes the mean of the ranks' squared norms of the sum of their shares.
    """

    large_sq: float
    large: int
    small: int
    factor: float

    def estimates(self, shared: float) -> tuple[float, float]:
        """Unbiased ones of |G|^2 and tr(Sigma): equations A.2 and A.3."""
        small_sq, large, small = shared * self.factor, self.large, self.small
        grad_sq = (large * self.large_sq - small * small_sq) / (large - small)
        return grad_sq, (small_sq - self.large_sq) / (1 / small - 1 / large)


@dataclass
class _Averages:
    """Weighted, over the windows.

    A gradient's norm falls by orders of magnitude while a run begins: in plain averages its first few windows would
    drown a hundred later ones. So each window counts by one over the squared norm of the window before it, which knows
    the size of the gradient, and nothing of this window's noise: the averages stay unbiased. No weight is more than
    MOST_WEIGHT times the average one: a gradient that is almost zero for once would speak for thousands of windows.

    Args:
        windows: that are in them.
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

    @property
    def noise(self) -> Noise | None:
        if self.windows < FEWEST_WINDOWS:
            return None
        return Noise(self.grad_sq / self.weight, self.variance / self.weight, *self.interval())

    def interval(self) -> tuple[float, float]:
        """Return the 95% confidence interval of the scale, in samples, at least 0; from two windows on.

        It holds each quotient R that the windows do not exclude (Fieller, "Some Problems in Interval Estimation",
        1954): those where the average of v - R g, whose expectation is 0 at the true R, is at most t standard errors
        from 0. A normal interval around the quotient would be wrong where the average of g is not far from 0 itself.
        The standard error is that of an average with unequal weights: a fraction of the windows' scatter that depends
        on their number only.
        """
        mass = 1 - SMOOTHING**self.windows  # of the weights (1 - s) s^i of the windows, newest first
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
        # g may be 0: the interval excludes nothing, or only the values between the two roots
        if a == 0 or b * b <= a * c:
            return 0.0, math.inf
        root = math.sqrt(b * b - a * c)
        low, high = (b + root) / a, (b - root) / a
        return (max(0.0, high) if low <= 0 else 0.0), math.inf


def _student(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution: Cornish and Fisher's expansion around the normal one."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
