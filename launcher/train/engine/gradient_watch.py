"""Gradients that the loss itself changes, and parameters that a backward pass or the first forward pass alone writes.

A loss that calls ``backward()`` adds gradients which the window divides by its items once more; one that calls
``zero_grad()`` loses those of earlier micro-batches. An optimizer that steps within the backward pass, in a hook, steps
with a part of the window's sum. A forward pass that initialises parameters from its first batch sees one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.quantities import first_names
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.loss_terms import LossWatch
from launcher.train.parallel.base import Parallel, times_written

LOOKS = 4  # micro-batches: some of them follow another one of their window


class GradientWatch(LossWatch):
    """Watch on the first micro-batches of this process, from the hand-out to the end of the backward pass."""

    def __init__(self, parallel: Parallel, *, tells: bool) -> None:
        self._parallel, self._left, self._tells = parallel, LOOKS, tells
        self._gradients: list[tuple[Tensor | None, int]] = []
        self._written: dict[str, int] = {}
        self._first: set[str] = set()  # parameters that the first forward pass has written

    @property
    def over(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self._left

    def hand_out(self, number: int, count: int) -> None:  # noqa: ARG002
        """Note gradients and parameters before the loss of the window's micro-batch ``number`` is computed."""
        if self._left:
            self._number, self._gradients, self._written = number, self._now(), self._parallel.written()

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:  # noqa: ARG002
        """Check that the loss has left the gradients alone, and name parameters that only the first of several
        micro-batches has written.

        Raises:
            TaskError: it has changed them.
        """
        if not self._left:
            return
        before, self._gradients = self._gradients, []
        same = all(a is b and m == n for (a, m), (b, n) in zip(before, self._now(), strict=True))
        if not same:
            raise TaskError(
                "The loss changes the gradients of the model's parameters: it calls backward() or zero_grad() itself."
                "\n  Return all terms as one total, which the launcher runs backward. For gradients of inputs use "
                "torch.autograd.grad(total, inputs),\n  which leaves those of the parameters alone."
            )
        before_loss, self._written = self._written, self._parallel.written()
        written = {name for name, times in before_loss.items() if self._written.get(name, times) != times}
        if self._left == LOOKS:
            self._first = written
        elif self._left == LOOKS - 1 and self._number > 1 and self._tells and (once := self._first - written):
            print(
                f"{first_names(sorted(once))}: written by the first forward pass, from one micro-batch, and not by the "
                "second. If the values depend on the batch,\n  the result depends on how a window is divided: set them "
                "in model(), or use batch.accumulation=1 on one rank.",
                flush=True,
            )

    def after_backward(self) -> None:
        """Check that the backward pass has left the parameters alone.

        Raises:
            TaskError: it has written some.
        """
        if not self._left:
            return
        self._left -= 1
        now = self._parallel.written()
        if names := [name for name, times in self._written.items() if now.get(name, times) != times]:
            raise TaskError(
                f"{first_names(names)}: written within the backward pass, by a hook that steps an optimizer or changes "
                "the value.\n  There the gradient is a part of the window's sum, not yet its mean. Return such "
                "optimizers from optimizer(model), in a list;\n  and change values in a hook of the optimizer "
                "(register_step_pre_hook), once for each step, or in a callback's on_step."
            )

    def _now(self) -> list[tuple[Tensor | None, int]]:
        return [(each, 0 if each is None else times_written(each)) for each in self._parallel.partial_gradients()]
