"""Count of a loss's items ahead: for a loss of several terms, before the first backward pass of a window of several
micro-batches.

The numbers come from the task's ``items(batch)`` if it has one; otherwise from a forward pass of each micro-batch
without gradient, after which the state that it can change is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.errors import EngineMisuse
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.oom import WindowAbandoned
from launcher.train.engine.preserved_state import PreservedState
from launcher.train.engine.window_totals import WindowLoss

# batch -> number of items of each term
Items = Callable[[Any], Sequence[float | Tensor]]
Run = Callable[[MicroBatch], list[Loss]]


class ItemCount:
    """Count of the items of a window's terms over all micro-batches and ranks.

    Attributes:
        items: the task's own function; None: items are counted by forward passes.
    """

    def __init__(self, parts: EngineParts, loss: WindowLoss) -> None:
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self._loss, self._preserve = loss, parts.preserve
        self._start: PreservedState | None = None
        self.items: Items | None = None

    def weighted(self, losses: Sequence[Loss], weight: float) -> Tensor:
        """Return the scalar of a backward pass: the terms' sum, see ``WindowLoss.weighted``. While the items of several
        terms are not counted yet, each term has the same weight."""
        return self._loss.weighted(losses, weight, self._loss.counted or [1.0] * len(losses))

    def due(self, count: int) -> bool | None:
        """Return whether the items of a window of ``count`` micro-batches must be counted before the next one; None for
        a plain loss."""
        if self._loss.plain:
            return None
        ahead = count > 1 or self._norms.look_ahead is not None  # whose passes need the terms' weights
        return ahead and self._loss.several and self._loss.counted is None

    def save(self, *, possible: bool) -> None:
        """Save the state before the first micro-batch of this process, which shows how many terms the loss has. If it
        has several, it runs again after they were counted.

        Args:
            possible: the window has several micro-batches, and their items can be counted.
        """
        wanted = possible and self._loss.parts is None and not self.due(2)
        self._start = self._preserve() if wanted else None

    def report_out_of_memory(self, count: int) -> bool:
        """Take part in the count of a window of ``count`` micro-batches as a rank that is out of memory; return whether
        there is one."""
        if due := bool(self.due(count)):
            self._loss.share_counts(out_of_memory=True)
        return due

    def require_saved(self, count: int) -> None:
        """Raise EngineMisuse if the items of a window of ``count`` micro-batches cannot be counted."""
        if self._start is None:
            raise EngineMisuse(
                "A loss of several terms needs the number of items of each term in the whole window before its first "
                f"backward pass, and this window has {count} micro-batches.\n"
                "  Pass engine.windows(..., items=function of a batch that returns the number of items of each term), "
                "or forward=function of (model, batch) that returns the terms; or use batch.accumulation=1."
            )

    def restore(self) -> None:
        """Restore the state that ``save`` has saved."""
        assert self._start is not None
        self._parallel.abandon()
        _restore(self._start)
        self._start = None

    def count(self, micro_batches: Sequence[MicroBatch], run: Run) -> None:
        """Count the items of all micro-batches of the window. All ranks call it.

        Args:
            run: the forward pass of a copy of a micro-batch through the unwrapped model.

        Raises:
            TaskError: the terms differ between micro-batches or ranks, a number is no count, or a forward pass has
                changed state that cannot be restored.
            WindowAbandoned: another rank ran out of memory.
        """
        if self.items is not None:
            for micro in micro_batches:
                if micro.samples:
                    self._loss.count(self.items(micro.data))
        else:
            state = self._preserve()
            with torch.no_grad(), self._parallel.meter.unchecked(), self._parallel.evaluation():
                for number, micro in enumerate(micro_batches, 1):
                    HEARTBEAT.beat(Phase.computing, number)
                    self._norms.trial(alone=True)
                    with self._precision.autocast():
                        losses = run(micro)
                    self._loss.require_parts(losses)
                    if micro.samples:
                        self._loss.count([loss.items for loss in losses])
            _restore(state)
        if self._loss.several and not self._loss.share_counts():
            raise WindowAbandoned


def _restore(state: PreservedState) -> None:
    state.restore(
        "the items of the loss's terms were counted",
        "Give the task a method items(batch) that returns the number of items of each term.",
    )
