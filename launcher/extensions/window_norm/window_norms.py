"""``batch.norm=window``: BatchNorm over all samples of a window, with the statistics and the gradient of one big batch.

The statistics of a layer depend on those of the layers before it, so they are computed layer by layer: for each, a
forward pass of all micro-batches without gradient. The gradient at a layer needs two means over the whole window (see
``Normalise``), which depend on the layers after it. So they are computed from the last layer to the first: for each, a
forward pass of all micro-batches, and the backward pass down to that layer. After that, each micro-batch can run on its
own, and the sum of their gradients is the gradient of the big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.errors import TaskError
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.preserved_state import PreservedState
from launcher.train.parallel.base import Parallel
from launcher.train.parallel.batchnorm import Normaliser, Ranks, Statistics, gradient_sums, normalise, sums_of, track
from launcher.train.parallel.mixed_precision import in_backward
from launcher.train.precision import Precision


@dataclass
class Call:
    """One use of a BatchNorm layer in a forward pass, the same in every micro-batch.

    Args:
        statistics: statistics of the window; None before they are computed.
        means: means of the gradient, and of the gradient times the result, [2, channels]; None before they are
            computed.
        without_gradient: it last ran under ``torch.no_grad``, as a reentrant checkpoint does.
    """

    layer: _BatchNorm
    statistics: Statistics | None = None
    means: Tensor | None = None
    without_gradient: bool = False


class Pass(Enum):
    """Purpose of a forward pass: to normalise each micro-batch by its own statistics, to compute the statistics or the
    means of a layer, or to train, with both known."""

    local = auto()
    statistics = auto()
    means = auto()
    whole = auto()


class WindowNorms(Normaliser):
    """Handling of ``window``: progress of the passes over a window, and their results.

    Args:
        gathers_once: a sharded model may stay gathered during these passes, as it does in the window itself.
    """

    def __init__(
        self, ranks: Ranks, parallel: Parallel, precision: Precision, device: torch.device, gathers_once: bool
    ) -> None:
        self._ranks, self._parallel, self._precision, self._device = ranks, parallel, precision, device
        self._gathers_once = gathers_once
        self._calls: list[Call] = []
        self._begin(Pass.local, counts=True)

    def _begin(self, stage: Pass, *, counts: bool, target: int = -1, learns: bool = False) -> None:
        """Start a forward pass.

        Args:
            target: index of the call that it computes something for.
            learns: record the calls of the model.
        """
        self._stage, self._counts, self._target, self._learns = stage, counts, target, learns
        self._number = 0
        self._sums: Tensor | None = None
        self._tap: Tensor | None = None

    def micro_batch(self, *, counts: bool) -> None:
        self._begin(Pass.whole, counts=counts)

    def trial(self, *, alone: bool) -> None:  # noqa: ARG002 (the passes over a whole window are not part of it)
        self._begin(Pass.local, counts=True)

    def look_ahead(
        self, micro_batches: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor], kept: PreservedState
    ) -> None:
        """Compute statistics and means of the whole window. All ranks call it.

        Args:
            loss: forward pass of a micro-batch through the unwrapped model; returns the scalar of its backward pass.
            kept: restored after each pass.

        Raises:
            TaskError: micro-batches do not use the same layers in the same order.
        """
        self._calls = []
        parallel = self._parallel
        with (
            parallel.meter.unchecked(),
            parallel.without_collectives() if self._gathers_once else parallel.evaluation(),
        ):
            number = 0
            while number < max(1, len(self._calls)):  # the first pass shows how many there are
                sums = self._pass(Pass.statistics, number, micro_batches, loss, kept)
                if sums is not None:
                    self._calls[number].statistics = Statistics.of_sums(sums)
                number += 1
            for number in reversed(range(len(self._calls))):
                call, sums = self._calls[number], self._pass(Pass.means, number, micro_batches, loss, kept)
                assert call.statistics is not None
                assert sums is not None
                call.means = sums / call.statistics.count

    def _pass(
        self, stage: Pass, target: int, micro_batches: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor],
        kept: PreservedState,
    ) -> Tensor | None:  # fmt: skip
        """Return the sums of call ``target`` over all micro-batches and ranks; None if there is no such call."""
        total: Tensor | None = None
        for nth, micro in enumerate(micro_batches):
            learns = stage is Pass.statistics and target == nth == 0
            self._begin(stage, counts=micro.samples > 0, target=target, learns=learns)
            with torch.set_grad_enabled(stage is Pass.means):
                scalar = loss(micro)
            if stage is Pass.means:
                self._sums = self._gradient_sums(scalar)
            if self._number != len(self._calls):
                raise self._other_layers(f"one ends after {self._number} of the first one's {len(self._calls)}")
            if self._sums is not None:
                total = self._sums if total is None else total + self._sums
        kept.restore("the passes that look ahead over a window", "Use batch.norm=sync.")
        return None if total is None else self._ranks.add_up(total)

    def _gradient_sums(self, scalar: Tensor) -> Tensor:
        assert self._tap is not None
        gradient: Tensor | None = None
        if scalar.requires_grad:  # without a sample too: a sharded model is gathered by all ranks
            with self._precision.no_autocast():
                (gradient,) = torch.autograd.grad(scalar, [self._tap], allow_unused=True)
        if gradient is None or not self._counts:
            gradient = torch.zeros_like(self._tap)
        return gradient_sums(gradient, self._tap.detach())

    def _call(self, layer: _BatchNorm) -> Call:
        if self._learns:
            self._calls.append(Call(layer))
        if self._number >= len(self._calls) or self._calls[self._number].layer is not layer:
            raise self._other_layers(f"layer {self._number + 1} of one is not that of the first")
        self._number += 1
        return self._calls[self._number - 1]

    def _recomputed(self, layer: _BatchNorm) -> Call:
        """Return the call of a layer that a checkpoint computes again in the backward pass, in an order of its own."""
        calls = [call for call in self._calls if call.layer is layer]
        if len(calls) != 1:
            raise TaskError(
                f"batch.norm=window: a {type(layer).__name__} that a forward pass uses {len(calls)} times is computed "
                "again in the backward pass (torch.utils.checkpoint), where the uses cannot be told apart.\n"
                "  Use batch.norm=sync, or leave the layer out of the checkpoint."
            )
        if calls[0].without_gradient:  # the means of the gradient, taken from the forward pass, are wrong
            raise TaskError(
                "batch.norm=window does not work with torch.utils.checkpoint(use_reentrant=True).\n"
                "  Use use_reentrant=False, or batch.norm=sync."
            )
        return calls[0]

    def _other_layers(self, how: str) -> TaskError:
        return TaskError(
            "batch.norm=window: each forward pass must use the same BatchNorm layers in the same order, and of one "
            f"window's micro-batches {how}.\n  Use batch.norm=sync."
        )

    def normalised(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        if self._stage is Pass.local:
            return self._with_own_statistics(layer, x)
        recomputed = in_backward()
        call = self._recomputed(layer) if recomputed else self._call(layer)
        number = self._number - 1
        if not recomputed:
            call.without_gradient = not torch.is_grad_enabled()
        if self._stage is Pass.statistics:
            if number == self._target:
                self._sums = sums_of(x, counts=self._counts)
            if number >= self._target:  # the result is not used, but should be finite
                return self._with_own_statistics(layer, x)
        assert call.statistics is not None
        means = call.means
        y = normalise(layer, x, call.statistics, None if means is None or not self._counts else lambda _: means)
        if self._stage is Pass.means and number == self._target and not recomputed:
            y = self._tap = y.detach().requires_grad_()  # earlier layers need no gradient in this pass
        return y

    def _with_own_statistics(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        with torch.no_grad():
            statistics = Statistics.of_sums(sums_of(x, counts=True))
        return normalise(layer, x, statistics, lambda sums: sums / statistics.count)

    def track(self) -> None:
        for call in self._calls:
            assert call.statistics is not None
            track(call.layer, call.statistics)
