"""The reference: the same samples as one big batch, in one process, by the task's own model and loss alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import default_collate

from launcher.config import Norm
from launcher.errors import RunError
from launcher.plan import RunPlan
from launcher.train.calibration import Kept
from launcher.train.forecast import free_host_bytes
from launcher.train.loader import to_device
from launcher.train.loop import as_loss
from launcher.train.norm import freeze
from launcher.train.randomness import seed_everything
from launcher.train.task import Loss, load_task
from launcher.train.verify.accumulated import Beginning, Gradient

Autocast = Callable[[], AbstractContextManager[object]]
# of the memory that is free, so much may be planned with: what is saved for backward is not all that a pass takes
_FREE_SHARE = 0.5
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Whole:
    """``gradient``: of the mean over the items, on the host. ``batches``: in how many it was computed."""

    gradient: Gradient
    loss: float
    items: float
    batches: int


@dataclass
class Plain:
    """The task and its model anew, unwrapped, as training begins with them."""

    plan: RunPlan
    beginning: Beginning
    device: torch.device
    most: int | None = None
    """Samples that fit into one batch, as far as that was found out."""
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        seed_everything(self.plan.train.seed)
        self.task = load_task(self.plan.task.target, self.plan.task.params, self.plan.cluster.import_from)
        self.model = self.task.model().to(self.device)
        if self.plan.batch.norm is Norm.freeze:
            freeze(self.model)
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                tensor.copy_(self.beginning.values[name])
        for name, module in self.model.named_modules():
            module.training = self.beginning.training[name]
        seed_everything(self.plan.train.seed + 1)
        self._collate = getattr(self.task, "collate", None) or default_collate
        self._kept = Kept(self.model, self.device)

    def put_back(self) -> None:
        """Random numbers and declared buffers, as they were in the beginning."""
        self._kept.put_back()

    def ask(self, samples: Sequence[Any]) -> Loss | Tensor:
        """What the task itself says of these samples as one batch."""
        return self.task.loss(self.model, to_device(self._collate(list(samples)), self.device))

    def loss(self, samples: Sequence[Any]) -> Loss:
        return as_loss(self.ask(samples), len(samples), self.plan.task.target)

    def backward(self, samples: Sequence[Any]) -> tuple[float, float, Gradient]:
        """Total loss, items, and the total's gradient, as one batch."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(samples)
        with torch.autocast(self.device.type, enabled=False):
            loss.total.backward()
        items = loss.items.item() if isinstance(loss.items, Tensor) else loss.items
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.requires_grad]
        gradient: Gradient = {name: None if g is None else g.detach().to("cpu", copy=True) for name, g in named}
        self.model.zero_grad(set_to_none=True)
        return loss.total.item(), float(items), gradient

    def whole(self, samples: Sequence[Any], autocast: Autocast = nullcontext) -> Whole:
        """The gradient of the window's mean: of one batch, or of as few as fit into memory, each sum added up.

        Raises:
            RunError: not even one sample fits.
        """
        self.most = self.most or self._estimate(samples)
        while True:
            size = min(self.most, len(samples))
            try:
                return self.in_batches([samples[i : i + size] for i in range(0, len(samples), size)], autocast)
            except (RuntimeError, MemoryError) as error:
                if not _is_for_memory(error):
                    raise
                if size == 1:
                    raise RunError(
                        "The reference does not fit: one sample of the whole model is too much for one device.\n"
                        "  Verify with more memory (cluster.device=cpu), or with a smaller model of the same code."
                    ) from None
            # beside the exception, which holds on to the pass's tensors
            self.model.zero_grad(set_to_none=True)
            self.most = size // 2

    def in_batches(self, batches: Sequence[Sequence[Any]], autocast: Autocast = nullcontext) -> Whole:
        """The same of batches as they are given: their sums added up, over all their items."""
        total, items, sums = 0.0, 0.0, dict[str, Tensor | None]()
        for batch in batches:
            self.put_back()
            with autocast():
                more, count, gradient = self.backward(batch)
            total, items = total + more, items + count
            for name, part in gradient.items():
                before = sums.get(name)
                sums[name] = part if before is None else before if part is None else before.add_(part)
        mean = {name: None if part is None else part.div_(items or 1.0) for name, part in sums.items()}
        return Whole(mean, total / (items or 1.0), items, len(batches))

    def _estimate(self, samples: Sequence[Any]) -> int:
        """How many samples' activations fit into the host's memory. A process that takes more than there is is killed,
        not told, so it is not tried; a GPU tells."""
        few = samples[: self.plan.batch.micro_size]
        if self.device.type != "cpu" or len(few) == len(samples):
            return len(samples)
        self.put_back()
        with _saved_bytes() as saved:
            self.loss(few)
        fitting = int(_FREE_SHARE * free_host_bytes() * len(few) / max(1, sum(saved.values())))
        return max(len(few), min(len(samples), fitting))


def _is_for_memory(error: BaseException) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in _NO_MEMORY)


@contextmanager
def _saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes that the forward passes inside keep for backward, by storage."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
