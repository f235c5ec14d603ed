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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from launcher.config.schema import PrecisionKind
from launcher.errors import TaskError
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss, has_window_loss, window_loss_of
from launcher.plan.batch import norm_of_window_loss
from launcher.plan.sync_policy import Collective
from launcher.task import seed_everything, seed_for
from launcher.train.data.loader import MicroBatch
from launcher.train.data.randomness import kept_random_state
from launcher.train.engine.build import EngineParts
from launcher.train.engine.loss_terms import require_terms
from launcher.train.engine.loss_watches import leaves_of
from launcher.train.measure.observer import Observer
from launcher.train.world import World

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


class WindowOutputs(Observer):
    """Loss of the window's rows on one rank, and observer of the differences between the two passes.

    Without the task's methods ``outputs`` and ``window_loss`` this object has no effect.

    Attributes:
        active: the task has these methods.

    Raises:
        ConfigError: the task has them, and ``batch.norm`` needs other passes over the window.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._task: Any = parts.owner
        self.active = has_window_loss(self._task)
        if self.active and parts.norms.look_ahead is not None:
            raise norm_of_window_loss(parts.plan.batch.norm)
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self._preserve = parts.preserve
        self._world, self._device, self._seed = parts.world, parts.device, parts.plan.train.seed
        self._tolerance = _SAME_ROWS.get(parts.plan.precision.kind, _SAME_NARROW_ROWS)
        self._form: str | None = None  # that all ranks have agreed on
        self._alone = False
        self.begin(0)

    def outputs(self, model: Callable[..., Any], batch: Any) -> Any:
        """Return the task's ``outputs`` of a micro-batch."""
        return self._task.outputs(model, batch)

    @property
    def exchanges(self) -> bool:
        """True if the ranks exchange rows in each window."""
        return self.active and self._world.size > 1

    def begin(self, window: int) -> None:
        """Start the window with the index ``window``."""
        self._window, self._number = window, 0
        self._shares: list[_Share] = []
        self._differences: list[Tensor] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which the loss of a micro-batch is that of its own rows, so that no rank waits for another."""
        self._alone = True
        yield
        self._alone = False

    def look_ahead(self, micro_batches: Sequence[MicroBatch], outputs: Callable[[MicroBatch], Any]) -> None:
        """Run all micro-batches of the window forward, and compute the gradient of its loss for their rows. All ranks
        call it; what the passes can change is restored.

        Args:
            outputs: the task's ``outputs`` of a copy of a micro-batch through the unwrapped model.

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
                    rows = Rows.of(outputs(micro), micro.samples or None)
                parts.append(replace(rows, tensors=[tensor.clone() for tensor in rows.tensors]))  # see Sums.add
        state.restore("the first of the two passes that window_loss needs", "Use batch.accumulation=1.")
        self._solve(parts, [micro.samples for micro in micro_batches])

    def loss(self, model: Callable[..., Any], batch: Any, samples: int) -> Loss:
        """Return the share of a micro-batch in the window's loss: its gradient for the parameters is that of the
        micro-batch's rows. All ranks call it for each of their micro-batches.

        Args:
            samples: of the micro-batch; 0 of a stand-in.
        """
        rows = Rows.of(self.outputs(model, batch), samples or None)
        if self._alone:
            return window_loss_of(self._task, rows.restored(rows.tensors))
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
        with self._counted(own):
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

    @contextmanager
    def _counted(self, own: Sequence[Tensor]) -> Iterator[None]:
        """Return a context for the exchange of rows, which is counted and timed."""
        if self._world.size == 1:
            yield
            return
        with self._parallel.meter.blocking(Collective.outputs, 8 + sum(tensor.nbytes for tensor in own)):
            yield

    def _gradients(self, rows: Rows, everyone: Sequence[Tensor]) -> tuple[Loss, list[Tensor | None]]:
        """Return the window's loss without gradient, and its gradient for the rows of all ranks.

        Random numbers are the same on all ranks, and not those of the forward passes.
        """
        leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in everyone]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        same = same_random_numbers(self._seed, f"window {self._window}", self._device)
        with same, torch.enable_grad(), self._precision.autocast():
            loss = window_loss_of(self._task, rows.restored(leaves))
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


@dataclass(frozen=True)
class Rows:
    """Result of ``outputs``: tensors whose first dimension is that of the samples, and their place in its structure."""

    tensors: list[Tensor]
    structure: TreeSpec

    @classmethod
    def of(cls, outputs: Any, samples: int | None) -> Rows:
        """Return the rows in the result of ``outputs``.

        Args:
            samples: number of rows that each tensor must have; None: as many as the first one.

        Raises:
            TaskError: it contains something else than tensors of so many rows.
        """
        leaves, structure = tree_flatten(outputs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_complex():
                raise TaskError("outputs() returned a complex tensor.\n  Return torch.view_as_real of it.")
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                kind = "a scalar tensor" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise TaskError(
                    f"outputs() returned {kind}, and must return tensors with one row for each sample: one, or a tuple "
                    "or dict of several.\n  Expand a number that window_loss needs, such as a temperature, to one for "
                    "each sample."
                )
            expected = len(leaves[0]) if samples is None else samples
            if len(leaf) != expected:
                raise TaskError(
                    f"outputs() returned a tensor of shape {list(leaf.shape)} for {expected} samples, and must return "
                    "one row for each sample, in their order."
                )
        if not leaves:
            raise TaskError("outputs() returned nothing.\n  Return what window_loss needs of each sample.")
        return cls(leaves, structure)

    @property
    def form(self) -> str:
        """Text that is the same for rows that can be put together."""
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape[1:])}" for tensor in self.tensors)
        return f"{self.structure}: {shapes}".replace("torch.", "")

    def require_same(self, world: World) -> None:
        """Raise TaskError unless all ranks have rows of this form. All ranks call it."""
        forms = world.of_all(self.form)
        for rank, form in enumerate(forms):
            if form != forms[0]:
                raise TaskError(f"outputs() returned {forms[0]} on rank 0, and {form} on rank {rank}.")

    def require_like(self, form: str) -> None:
        """Raise TaskError unless the rows have the form of other micro-batches."""
        if self.form != form:
            raise TaskError(
                f"outputs() returned {form} for one micro-batch, and {self.form} for another.\n"
                "  Return the same tensors for every micro-batch, with rows of one shape: pad them to a fixed length."
            )

    def restored(self, tensors: Sequence[Tensor]) -> Any:
        """Return ``tensors`` in the structure of ``outputs``."""
        return tree_unflatten(list(tensors), self.structure)


def joined(parts: Sequence[Rows], counts: Sequence[int]) -> list[Tensor]:
    """Return the rows of several micro-batches as one tensor each, without gradient.

    Args:
        counts: samples of each micro-batch; one without samples is a stand-in, whose rows are left out.
    """
    used = [part for part, count in zip(parts, counts, strict=True) if count]
    if not used:
        return [tensor.detach()[:0] for tensor in parts[0].tensors]
    return [
        torch.cat([tensor.detach() for tensor in each]) for each in zip(*(rows.tensors for rows in used), strict=True)
    ]


def gathered(tensors: Sequence[Tensor], world: World, device: torch.device) -> list[list[Tensor]]:
    """Return ``tensors`` of each rank, by rank; their numbers of rows may differ. All ranks call it."""
    if world.size == 1:
        return [list(tensors)]
    own = len(tensors[0])
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(world.size)]
    dist.all_gather(counts, torch.tensor(own, device=device))
    numbers = [int(count) for count in torch.stack(counts).tolist()]
    sizes = [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors]
    sent = torch.zeros(max(numbers), sum(sizes), dtype=torch.uint8, device=device)
    for tensor, part in zip(tensors, sent[:own].split(sizes, 1), strict=True):
        if tensor.numel():
            part.copy_(_packed(tensor).view(torch.uint8).reshape(own, -1))
    received = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(received, sent)
    return [
        [
            _packed(part).view(tensor.dtype).reshape(number, *tensor.shape[1:])
            for tensor, part in zip(tensors, rows[:number].split(sizes, 1), strict=True)
        ]
        for rows, number in zip(received, numbers, strict=True)
    ]


def _packed(tensor: Tensor) -> Tensor:
    """Return a copy in one dimension, which can be viewed as another dtype. ``contiguous`` copies no single row: that
    would keep an offset, or strides, which a wider dtype does not allow."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1)


@contextmanager
def same_random_numbers(seed: int, part: str, device: torch.device) -> Iterator[None]:
    """Return a context in which ``window_loss`` draws the same random numbers on all ranks; the state of the generators
    is restored.

    Args:
        part: the rows that it is called with.
    """
    with kept_random_state(device):
        seed_everything(seed_for(seed, f"window_loss of {part}"))
        yield
