"""Reference gradient: the same samples as one big batch, in one process, using only the task's own model and loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import default_collate

from launcher.config.schema import Norm
from launcher.errors import RunError
from launcher.extensions.verify.accumulated import EngineRun
from launcher.extensions.verify.comparison import Gradient
from launcher.loss import Loss, as_losses, loss_form, loss_of_batch
from launcher.plan.host import free_host_bytes
from launcher.plan.run_plan import RunPlan
from launcher.task import build_model, load_task, seed_everything, train_data
from launcher.train.context import ContextSource
from launcher.train.data.loader import to_device
from launcher.train.engine.loss_terms import sum_of_means
from launcher.train.engine.modes import start_training
from launcher.train.engine.oom import is_out_of_memory
from launcher.train.engine.preserved_state import SavedState
from launcher.train.parallel.batchnorm import freeze
from launcher.train.parallel.mixed_precision import set_format
from launcher.train.precision import Precision

# usable fraction of free memory: a pass needs more than the tensors saved for backward
_FREE_SHARE = 0.5


@dataclass(frozen=True)
class ReferenceWindow:
    """Reference of a window.

    Attributes:
        gradient: of the mean over the items, on the host; of several terms, of the sum of their means.
        unused: parameters on which the loss does not depend.
        batches: number of batches in which it was computed.
    """

    gradient: Gradient
    unused: list[str]
    loss: float
    items_of_terms: tuple[float, ...]
    batches: int

    @property
    def items(self) -> float:
        """Number of items, of the first term if there are several."""
        return self.items_of_terms[0]


@dataclass
class Reference:
    """The task and its unwrapped model at the start of training, in the arithmetic of ``plan.precision``.

    Args:
        run: of the engine of the same plan, from which values and number formats are taken.
        most: samples that fit into one batch, if known.

    Attributes:
        position: step and epoch that ``launcher.current()`` returns.
    """

    plan: RunPlan
    run: EngineRun
    device: torch.device
    most: int | None = None
    model: nn.Module = field(init=False)
    position: tuple[int, int] = (1, 0)

    def __post_init__(self) -> None:
        task, seed = self.plan.task, self.plan.train.seed
        self.task = load_task(task.target, task.params, self.plan.cluster.import_from, seed)
        self.model = build_model(self.task, seed).to(self.device)
        if self.run.with_data:
            train_data(self.task, seed)
        if self.plan.batch.norm is Norm.freeze:
            freeze(self.model)
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                value = self.run.values[name]
                if value.dtype != tensor.dtype:
                    tensor.data = tensor.data.to(value.dtype)
                tensor.copy_(value)
        set_format(self.model, self.plan)
        start_training(self.model)
        for name, module in self.model.named_modules():
            module.training = self.run.training[name]
        self.precision = Precision(self.plan.precision, self.device)
        seed_everything(seed + 1)
        self.context = ContextSource(self.device, seed, progress=lambda: self.position)
        self._collate = getattr(self.task, "collate", None) or default_collate
        self.save()

    def enter(self, number: int) -> None:
        """Set the step and epoch of the engine's window ``number``, on which a loss may depend."""
        if number < len(self.run.windows):
            result = self.run.windows[number].result
            self.position = result.step + result.skipped, result.epoch

    def save(self) -> None:
        """Save random number state and declared buffers for ``restore``."""
        self._saved = SavedState(self.model, self.device)

    def restore(self) -> None:
        """Restore random number state and declared buffers from the start or the last ``save``."""
        self._saved.restore()

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Context in which half of the trained numbers are one unit in the last place closer to zero."""
        generator = torch.Generator().manual_seed(0)
        before = [(p, p.detach().clone()) for p in self.model.parameters() if p.requires_grad and not p.is_complex()]
        with torch.no_grad():
            for p, value in before:
                moved = torch.rand(p.shape, generator=generator).to(p.device) < 0.5
                p.copy_(torch.where(moved, value.nextafter(torch.zeros_like(value)), value))
        yield
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)

    def task_loss(self, samples: Sequence[Any]) -> Loss | Sequence[Loss] | Tensor:
        """Return the task's own loss of these samples as one batch."""
        with self.context.active():
            batch = to_device(self._collate(list(samples)), self.device)
            with self.precision.autocast():
                return loss_of_batch(self.task, self.model, batch)

    def losses(self, samples: Sequence[Any]) -> list[Loss]:
        """Return the terms of the task's loss of these samples as one batch."""
        return as_losses(self.task_loss(samples), len(samples), self.plan.task.target)

    def mean(self, samples: Sequence[Any]) -> float:
        """Return the mean loss of these samples as one batch; of several terms, the sum of their means."""
        terms = self.losses(samples)
        return sum_of_means([(term.total.item(), float(term.items)) for term in terms])

    def _backward(self, samples: Sequence[Any]) -> list[tuple[float, float, Gradient]]:
        """Return (total loss, items, gradient of the total without unused parameters) of each term, for the samples as
        one batch."""
        terms = self.losses(samples)
        return [self._backward_of(term, several=len(terms) > 1) for term in terms]

    def _backward_of(self, loss: Loss, *, several: bool) -> tuple[float, float, Gradient]:
        items = float(loss.items)
        if several and not loss.total.requires_grad:  # a term without items in this batch
            return loss.total.item(), items, Gradient()
        # fp16: backward of the mean times a loss scale, as in training
        factor = self.plan.precision.init_scale / (items or 1.0) if self.precision.scales else 1.0
        while True:
            self.model.zero_grad(set_to_none=True)
            with self.precision.no_autocast():
                (loss.total * factor).backward(retain_graph=several or self.precision.scales)
            named = self.model.named_parameters()
            gradient = {name: _on_host(p.grad, factor) for name, p in named if p.grad is not None}
            if factor * items <= 1 or not self.precision.scales or all(g.isfinite().all() for g in gradient.values()):
                break
            factor /= 2
        self.model.zero_grad(set_to_none=True)
        return loss.total.item(), items, gradient

    def window(self, samples: Sequence[Any]) -> ReferenceWindow:
        """Return the gradient of the window's mean, computed in one batch or in as few as fit into memory.

        Raises:
            RunError: not even one sample fits; or the window does not, and its loss is that of the whole window.
        """
        whole = loss_form(self.task) is not None  # the loss has no sum over batches
        self.most = self.most or (len(samples) if whole else self._estimate(samples))
        while True:
            size = len(samples) if whole else min(self.most, len(samples))
            try:
                return self.in_batches([samples[i : i + size] for i in range(0, len(samples), size)])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1 or whole:
                    least = "a window as one batch, which window_loss needs" if whole else "one sample"
                    raise RunError(
                        f"The reference does not fit into memory, not even with {least} and the whole model.\n"
                        "  Verify with more memory (cluster.device=cpu), or with a smaller model of the same code."
                    ) from None
            # outside the except block: the exception keeps the pass's tensors alive
            self.model.zero_grad(set_to_none=True)
            self.most = size // 2

    def in_batches(self, batches: Sequence[Sequence[Any]]) -> ReferenceWindow:
        """Return the gradient of the mean over given batches: their sums added up, divided by all their items."""
        terms: dict[int, tuple[float, float, Gradient]] = {}
        for batch in batches:
            self.restore()
            for number, (batch_total, batch_items, gradient) in enumerate(self._backward(batch)):
                total, items, sums = terms.setdefault(number, (0.0, 0.0, Gradient()))
                for name, part in gradient.items():
                    sums[name] = sums[name].add_(part) if name in sums else part
                terms[number] = total + batch_total, items + batch_items, sums
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        mean = {}
        for _, items, sums in terms.values():
            for name, part in sums.items():
                if items:
                    part.div_(items)
                elif len(terms) > 1:  # a term without an item is left out; the only one keeps its sum
                    part.zero_()
                mean[name] = mean[name].add_(part) if name in mean else part
        unused = [name for name in trained if name not in mean]
        mean |= {name: torch.zeros(trained[name].shape) for name in unused}
        mean = {name: mean[name] for name in trained}
        totals = [(total, items) for total, items, _ in terms.values()]
        loss = sum_of_means(totals) if any(items for _, items in totals) else 0.0
        return ReferenceWindow(mean, unused, loss, tuple(items for _, items in totals), len(batches))

    def _estimate(self, samples: Sequence[Any]) -> int:
        """Return how many samples' activations fit into the host's memory.

        Trying is not an option on a CPU: a process that exceeds memory is killed without an exception. A GPU raises
        one.
        """
        few = samples[: self.plan.batch.micro_size]
        if self.device.type != "cpu" or len(few) == len(samples):
            return len(samples)
        self.restore()
        with _saved_bytes() as saved:
            self.losses(few)
        fitting = int(_FREE_SHARE * free_host_bytes() * len(few) / max(1, sum(saved.values())))
        return max(len(few), min(len(samples), fitting))


def _on_host(gradient: Tensor, factor: float) -> Tensor:
    """Return a copy in fp32 or wider, divided by the loss ``factor``."""
    copy = gradient.detach().to("cpu", torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return copy if factor == 1 else copy.div_(factor)


@contextmanager
def _saved_bytes() -> Iterator[dict[int, int]]:
    """Record the bytes that forward passes inside the context save for backward, by storage address."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
