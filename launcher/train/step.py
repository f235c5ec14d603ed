"""Around a step's arithmetic: the window's totals, the flags that the ranks agree on, the result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.config import Sync
from launcher.errors import DataError, EngineMisuse, NotFinite
from launcher.train.calibration import Calibrated
from launcher.train.meter import CommStats
from launcher.train.world import World


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One window's outcome, over all ranks.

    Args:
        step: optimizer steps taken so far, this one included unless it was skipped.
        window: index of the window in the run, from 0; epoch: from 0.
        loss: sum over the window's items divided by their number.
        grad_norm: global norm of the gradient of that mean, unscaled, before clipping.
        lr: learning rate that was applied, of the first parameter group.
        samples, items: what the window held, on all ranks.
        micro_batches: run by each rank.
        skipped: fp16 overflowed, and neither parameters nor schedule moved.
        scale: fp16 loss scale of this window; None without scaling.
        sync: the policy of this window; comm: what it sent, on this rank.
        calibrated: once, when the calibration is over.
        step_s, data_s: wall seconds of the window, and of those, waiting for data.
        last: no window follows; stopped: because a rank was asked to stop.
        save_due: a checkpoint is due by rank 0's clock.
    """

    step: int
    window: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    items: int
    micro_batches: int
    skipped: bool
    scale: float | None
    sync: Sync
    comm: CommStats
    calibrated: Calibrated | None
    step_s: float
    data_s: float
    last: bool
    stopped: bool
    save_due: bool


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the window's small collective. ``items``: -1 where a count was negative or not finite.
    ``grad_norm`` is of the gradients as they stand."""

    items: int
    loss_sum: float
    samples: int
    more: bool
    stop: bool
    save_due: bool
    grad_norm: float


class WindowTotals:
    """Sums over a window, and the one small all-reduce that shares them and every flag.

    It is sent before the last backward pass and received after it, so the backend can overlap the two. The host
    reads the device once a window, here.
    """

    BYTES = 6 * 8

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self.clear()

    def clear(self) -> None:
        self.losses: list[Tensor] = []
        self._items: list[Tensor] = []
        self._counted_items = 0
        self._samples = 0
        self._shared: Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, loss_sum: Tensor, items: int | Tensor, samples: int) -> None:
        self.losses.append(loss_sum.detach())
        self._samples += samples
        if isinstance(items, Tensor):
            self._items.append(items.detach())
        else:
            self._counted_items += items

    def send(self, has_next: bool, stop: bool, save_due: bool) -> None:
        known = [self._counted_items, 0, self._samples, has_next, stop, save_due]
        # from pinned memory: an ordinary copy would hold the host until the GPU is through with the forward pass
        flags = torch.tensor(known, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        flags = flags.to(self._device, non_blocking=True)
        if self.losses:
            flags[1] = _sum(self.losses)
        if self._items:
            flags[0] += _count(self._items)
        if self._world.size > 1:
            self._work = dist.all_reduce(flags, async_op=True)
        self._shared = flags

    @property
    def sent(self) -> bool:
        return self._shared is not None

    def items_of_all(self) -> int:
        """The window's items on all ranks; the host waits for them."""
        assert self._shared is not None
        if self._work is not None:
            self._work.wait()
        items = self._shared[0].item()
        return round(items) if math.isfinite(items) else 0

    def receive(self, grad_norm: Tensor) -> Agreed:
        assert self._shared is not None
        if self._work is not None:
            self._work.wait()
        # of offloaded gradients the norm is on the host
        both = torch.cat((self._shared, grad_norm.detach().to(self._device, torch.float64).reshape(1)))
        items, loss_sum, samples, more, stop, save_due, norm = both.tolist()
        whole = round(items) if math.isfinite(items) else -1
        return Agreed(whole, loss_sum, round(samples), more > 0, stop > 0, save_due > 0, norm)


def require_sum(loss_sum: Tensor, items: int | Tensor) -> None:
    """What goes into a backward pass, as far as the host can see it without waiting for the device.

    Raises:
        EngineMisuse: the loss is no scalar with a gradient, or ``items`` is no count.
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"a tensor of shape {list(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else repr(loss_sum)
        raise EngineMisuse(
            f"The loss is {found}: want a scalar tensor, the sum over the micro-batch's items.\n"
            "  Add it up (reduction='sum'), and give the number of items with it."
        )
    if not loss_sum.requires_grad:
        raise EngineMisuse(
            "The loss does not require a gradient: it was detached, made from a number, or computed under no_grad."
        )
    problem = None
    if isinstance(items, Tensor):
        if items.requires_grad:
            problem = "require a gradient: they were computed from the model's output"
        elif items.numel() != 1:
            problem = f"are a tensor of shape {list(items.shape)}"
    elif items < 0:
        problem = f"are {items}"
    if problem is not None:
        raise EngineMisuse(
            f"The items {problem}. They are how many items the loss sums over: one number, 0 or more.\n"
            "  Count them in the targets, such as (targets != padding).sum()."
        )


def _count(items: list[Tensor]) -> Tensor:
    """Their sum; not a number where one is negative, so that no other can make up for it."""
    counts = torch.stack([count.reshape(()) for count in items]).double()
    return torch.where((counts < 0).any(), math.nan, counts.sum())


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack([v.reshape(()) for v in values]).sum(dtype=torch.float64)


def agree_on_divisor(items: int | Tensor, micro_batches: int, world: World, device: torch.device) -> float:
    """C: a power of two near the items of a rank's window: scaling by it is exact, and fp16 stays in range.

    Args:
        items: of this rank's first micro-batch.
    """
    most = torch.as_tensor(items, dtype=torch.float64, device=device).detach().reshape(1)
    if world.size > 1:
        most = most.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return 2.0 ** round(math.log2(max(1.0, most.item() * micro_batches)))


def explain_bad_loss(totals: WindowTotals, world: World, step: int) -> NotFinite:
    """The error that every rank raises together: which rank and micro-batch it was, and what to try."""
    bad = [n + 1 for n, loss in enumerate(totals.losses) if not torch.isfinite(loss).item()]
    everyone: list[list[int]] = [bad] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, bad)
    where = "; ".join(
        f"rank {rank}, micro-batch {', '.join(map(str, numbers))}" for rank, numbers in enumerate(everyone) if numbers
    )
    return NotFinite(
        f"The loss of step {step} is not finite (inf or nan): {where or 'only its sum overflows'}.\n"
        "  Nothing was applied. Try a lower optimizer.lr, a longer schedule.warmup_steps, a lower train.clip_norm, or "
        "precision=fp32; if it comes at once, look at the data and the loss of that micro-batch."
    )


def explain_bad_items(step: int, items: int) -> DataError:
    """``items``: 0, or -1 as ``Agreed`` has it."""
    if items:
        return DataError(
            f"A micro-batch of step {step} has items that are negative, or not finite.\n"
            "  They are how many items its loss sums over, such as (targets != padding).sum()."
        )
    return DataError(
        f"The window of step {step} holds no item: the loss has nothing to be averaged over.\n"
        "  Leave out samples without items (all padding) in train_data()."
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def explain_bad_gradient(step: int, norm: float, model: nn.Module) -> NotFinite:
    """The loss is finite and its gradient is not."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not torch.isfinite(local(gradient)).all().item()]
    shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return NotFinite(
        f"The gradient of step {step} has norm {norm}, though its loss is finite: {shown or 'the norm alone'}.\n"
        "  Nothing was applied. Look for a square root or a logarithm at 0, or try precision=fp32."
    )
