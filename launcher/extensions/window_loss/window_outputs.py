"""Loss of a whole window: for a task with ``outputs`` and ``window_loss`` instead of ``loss``.

Such a loss is any function L of the rows r_1, r_2, ... that the model returns for the samples of a window, on all
ranks: a contrastive loss, a correlation. By the chain rule its gradient is the sum over micro-batches of

    sum_i (dL/dr_i) * (dr_i/dparameters)        (i: rows of the micro-batch)

so a first pass runs the forward passes of all micro-batches without gradient, the rows of all ranks are gathered, each
rank computes L and dL/dr_i once, and the window's usual passes then run backward from dL/dr_i. That is exact for every
number of ranks and micro-batches (Gao et al., "Scaling deep contrastive learning batch size under memory limited
setup", 2021, where it is called gradient cache). A window of one micro-batch needs no first pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher.config.schema import PrecisionKind
from launcher.errors import TaskError
from launcher.extensions.window_loss.rows import (
    HeldOutRows,
    Rows,
    gathered,
    joined,
    loss_of_rows,
    same_random_numbers,
)
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss, LossForm
from launcher.plan.batch import norm_of_window_loss
from launcher.plan.sync_policy import Collective
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.engine import Engine
from launcher.train.engine.loss_terms import require_terms
from launcher.train.engine.loss_watches import leaves_of
from launcher.train.engine.window import LossOverWindow, RunCopy

# relative difference of the rows in the two passes: of rounding at most, which a compiled model may do in another way
_SAME_ROWS = {PrecisionKind.fp32: 1e-3}
_SAME_NARROW_ROWS = 0.05


class _FromRows(torch.autograd.Function):
    """A number whose gradient with respect to the rows is given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gradients, ctx.dtypes = gradients, [row.dtype for row in rows]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Any) -> Any:
        (factor,) = factors
        parts = (gradient * factor.to(gradient.device) for gradient in ctx.gradients)
        return None, None, *(part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True))


@dataclass(frozen=True)
class _Share:
    """Part of a micro-batch in the window's loss.

    Args:
        gradients: dL/dr of its rows, by tensor; None for rows that have none, such as labels.
        loss: the loss, without gradient; the sum over all micro-batches and ranks is that of the window.
        rows: the rows of the first pass.
    """

    gradients: list[Tensor | None]
    loss: Loss
    rows: list[Tensor]


class WindowLossForm(LossForm):
    """Form of the loss of a task with ``outputs`` and ``window_loss``."""

    methods = ("outputs",)

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        if callable(getattr(task, "loss", None)):
            raise TaskError(
                f"{type(task).__module__}.{type(task).__qualname__}: the class has both loss and window_loss.\n"
                "  Leave one out: loss(model, batch) for a sum over samples, or outputs(model, batch) and "
                "window_loss(outputs) for a loss of all samples of a window."
            )

    def of_batch(self, model: Callable[..., Any], batch: Any) -> Loss:
        rows = Rows.of(self.task.outputs(model, batch), None)
        return loss_of_rows(self.task, rows.restored(rows.tensors))

    def in_windows(self, parts: EngineParts) -> WindowOutputs:
        return WindowOutputs(self.task, parts)

    def held_out(self, engine: Engine, data: Any) -> HeldOutRows:
        return HeldOutRows(self.task, engine, data)


class WindowOutputs(LossOverWindow):
    """Loss of the window's rows on one rank, and observer of the differences between the two passes.

    Raises:
        ConfigError: ``batch.norm`` needs other passes over the window.
    """

    def __init__(self, task: Any, parts: EngineParts) -> None:
        self._task = task
        if parts.norms.look_ahead is not None:
            raise norm_of_window_loss(parts.plan.batch.norm)
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self._preserve = parts.preserve
        self._world, self._device, self._seed = parts.world, parts.device, parts.plan.train.seed
        self._tolerance = _SAME_ROWS.get(parts.plan.precision.kind, _SAME_NARROW_ROWS)
        self._form: str | None = None  # that all ranks have agreed on
        self.begin(0)

    def begin(self, window: int) -> None:
        self._window, self._number = window, 0
        self._shares: list[_Share] = []
        self._differences: list[Tensor] = []

    def look_ahead(self, micro_batches: Sequence[MicroBatch], run: RunCopy) -> None:
        """Run all micro-batches of the window forward, and compute the gradient of its loss for their rows. What the
        passes can change is restored.

        Raises:
            TaskError: see ``Rows.of`` and ``_solve``, or a forward pass changes state that cannot be restored.
        """
        state = self._preserve()
        parts: list[Rows] = []
        with torch.no_grad(), self._parallel.meter.unchecked(), self._parallel.evaluation():
            for number, micro in enumerate(micro_batches, 1):
                HEARTBEAT.beat(Phase.computing, number)
                self._norms.micro_batch(counts=micro.samples > 0)
                with self._precision.autocast():
                    rows = Rows.of(run(self._task.outputs, micro), micro.samples or None)
                parts.append(replace(rows, tensors=[tensor.clone() for tensor in rows.tensors]))  # see Sums.add
        state.restore("the first of the two passes that window_loss needs", "Use batch.accumulation=1.")
        self._solve(parts, [micro.samples for micro in micro_batches])

    def loss(self, model: Callable[..., Any], batch: Any, samples: int) -> Loss:
        rows = Rows.of(self._task.outputs(model, batch), samples or None)
        if self._shares:
            self._compare(rows.tensors, self._shares[self._number])
        else:
            self._solve([rows], [samples])
        share, self._number = self._shares[self._number], self._number + 1
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(rows.tensors, share.gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        total = _FromRows.apply(share.loss.total, [gradient for _, gradient in pairs], *(tensor for tensor, _ in pairs))
        return Loss(total, share.loss.items, share.loss.metrics, share.loss.name)  # pyright: ignore[reportArgumentType]

    def _compare(self, rows: Sequence[Tensor], share: _Share) -> None:
        """Keep for ``contribution`` whether the rows are those of the first pass."""
        for now, before in zip(rows, share.rows, strict=True):
            if now.shape != before.shape:
                raise TaskError(
                    _difference(f"shape {list(before.shape)} in the first, {list(now.shape)} in the second")
                )
            now, before = now.detach().double(), before.double()
            self._differences.append((now - before).norm() > self._tolerance * before.norm())

    def _solve(self, parts: Sequence[Rows], counts: Sequence[int]) -> None:
        """Compute the window's loss and its gradient for the rows of all ranks, and the micro-batches' shares in it.

        Raises:
            TaskError: the rows of micro-batches or ranks cannot be put together, or the result of ``window_loss`` is
                no loss of these rows.
        """
        first = parts[0]
        if self._form is None:
            first.require_same(self._world)
            self._form = first.form
        for rows in parts:
            rows.require_like(self._form)
        own = joined(parts, counts)
        sent = 8 + sum(tensor.nbytes for tensor in own)
        alone = self._world.size == 1
        with nullcontext() if alone else self._parallel.meter.blocking(Collective.outputs, sent):
            of_ranks = gathered(own, self._world, self._device)
        numbers = [len(tensors[0]) for tensors in of_ranks]
        everyone = [torch.cat(each) for each in zip(*of_ranks, strict=True)]
        loss, gradients = self._gradients(first, everyone)
        start = sum(numbers[: self._world.rank])
        for rows, count in zip(parts, counts, strict=True):
            parts_of_gradients = [
                None if gradient is None else gradient[start : start + count] if count else torch.zeros_like(tensor)
                for gradient, tensor in zip(gradients, rows.tensors, strict=True)
            ]
            share = _share(loss, start, count, sum(numbers))
            self._shares.append(_Share(parts_of_gradients, share, [tensor.detach() for tensor in rows.tensors]))
            start += count

    def _gradients(self, rows: Rows, everyone: Sequence[Tensor]) -> tuple[Loss, list[Tensor | None]]:
        """Return the window's loss without gradient, and its gradient for the rows of all ranks.

        Random numbers are the same on all ranks, and not those of the forward passes.
        """
        leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in everyone]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        same = same_random_numbers(self._seed, f"window {self._window}", self._device)
        with same, torch.enable_grad(), self._precision.autocast():
            loss = loss_of_rows(self._task, rows.restored(leaves))
        require_terms([loss])
        if not loss.total.requires_grad:
            raise TaskError(
                "The result of window_loss does not depend on the outputs, or was detached from them: there is nothing "
                "to train."
            )
        rows_of_loss = {id(leaf) for leaf in trained}
        if others := [leaf for leaf in leaves_of([loss.total]) if id(leaf) not in rows_of_loss]:
            raise TaskError(
                f"window_loss uses a parameter of shape {list(others[0].shape)} itself, which would get no gradient.\n"
                "  Use it in outputs(model, batch): scale the rows with it, or return it once for each sample, such as "
                "temperature.expand(len(rows))."
            )
        # small gradients of fp16 rows are lost unless the loss is scaled before, as in the backward pass itself
        items = float(loss.items)
        factor = 1.0
        if (scale := self._precision.scale) is not None:
            factor = scale / 2.0 ** round(math.log2(max(items, 1.0)))
        with self._precision.no_autocast():
            found = iter(torch.autograd.grad(loss.total * factor, trained, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        if factor != 1:
            gradients = [None if gradient is None else gradient.float() / factor for gradient in gradients]
        items = int(items) if items.is_integer() else items
        return Loss(loss.total.detach().double(), items, loss.metrics, loss.name), gradients

    def contribution(self) -> Sequence[Tensor | float]:
        """Return the number of tensors that differ between the passes."""
        return [torch.stack(self._differences).sum().double() if self._differences else 0.0]

    def receive(self, sums: Sequence[float]) -> None:
        """Raise TaskError if rows differ between the passes, on all ranks."""
        if sums[0]:
            raise TaskError(_difference("others"))


def _difference(what: str) -> str:
    return (
        f"The outputs of a micro-batch differ between the two passes that window_loss needs: {what}. Nothing was "
        "applied.\n"
        "  The forward pass may depend on parameters, buffers, attributes of the model and the task, and on random "
        "numbers of torch, Python and NumPy; or use batch.accumulation=1, which needs one pass."
    )


def _share(loss: Loss, start: int, count: int, of: int) -> Loss:
    """Return the part of ``count`` of ``of`` rows from ``start`` on. Whole items stay whole."""
    part = count / of
    if isinstance(loss.items, int):
        items = loss.items * (start + count) // of - loss.items * start // of
    else:
        items = loss.items * part
    metrics = {name: (_wide(total) * part, _wide(number) * part) for name, (total, number) in loss.metrics.items()}
    return Loss(loss.total * part, items, metrics, loss.name)


def _wide(value: float | Tensor) -> float | Tensor:
    return value.detach().double() if isinstance(value, Tensor) else value
