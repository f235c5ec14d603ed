"""Observers of the training step: what is measured beside it, without a branch or a collective of its own in it.

In each window an observer contributes numbers to the one small all-reduce that the step needs anyway, receives their
sums over the ranks, and is notified how the window ended. A value that exists only once a
window is over, such as its time, is summed in the next window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EndedWindow:
    """A window after its optimizer step.

    Args:
        samples: number of samples in the window, on all ranks.
        items: number of items that the loss was averaged over.
        comparable: whether its time and gradient can be compared with those of other windows: it was applied, held a
            full global batch, and gave every rank the same number of samples.
        grad_norm: norm of its mean gradient before the clip.
        gradient_unit: factor between a rank's gradient of a sum over items and the gradient that its backward passes
            have left: the constant C that losses are divided by, divided by the loss scale of fp16.
        step_s: seconds of the window on this rank.
        data_s: seconds of these spent waiting for data.
        wait_s: seconds of these spent waiting for other ranks.
    """

    samples: int
    items: float
    comparable: bool
    grad_norm: float
    gradient_unit: float
    step_s: float
    data_s: float
    wait_s: float


class Observer:
    """Something measured in each window.

    Args:
        width: how many numbers it contributes.
    """

    width = 1

    def contribution(self) -> Sequence[Tensor | float]:
        """Return this rank's numbers, to be summed over the ranks. Tensors are scalars; the host does not wait for
        them."""
        raise NotImplementedError

    def receive(self, sums: Sequence[float]) -> None:
        """Take the sums over all ranks, before the optimizer step."""

    def window_ended(self, window: EndedWindow) -> None:
        """Take note of a window; called after its optimizer step."""
