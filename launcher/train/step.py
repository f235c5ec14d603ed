"""Around a step's arithmetic: the window's totals, the flags that the ranks agree on, the result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.config import Sync
from launcher.errors import NotFinite
from launcher.train.calibration import Calibrated
from launcher.train.meter import CommStats
from launcher.train.noise import Noise
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
        noise: what the windows before this one say of the gradient's noise; None while too few of them do.
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
    noise: Noise | None
    step_s: float
    data_s: float
    last: bool
    stopped: bool
    save_due: bool


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the window's small collective. ``own_squares``: of the window before, what the ranks'
    own gradients come to (noise.py). ``grad_norm`` is of the gradients as they stand."""

    items: int
    loss_sum: float
    samples: int
    more: bool
    stop: bool
    save_due: bool
    own_squares: float
    grad_norm: float


_OWN_SQUARE = 6  # its place among the flags


class WindowTotals:
    """Sums over a window, and the one small all-reduce that shares them and every flag.

    It is sent before the last backward pass and received after it, so the backend can overlap the two. The host
    reads the device once a window, here.
    """

    BYTES = 7 * 8

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

    @property
    def here(self) -> tuple[Tensor | float, int]:
        """Items and samples of this rank so far; the host does not wait for them."""
        counted = float(self._counted_items)
        return (counted + _sum(self._items) if self._items else counted), self._samples

    def send(self, has_next: bool, stop: bool, save_due: bool, own_square: Tensor | float) -> None:
        known = [self._counted_items, 0, self._samples, has_next, stop, save_due, 0]
        # from pinned memory: an ordinary copy would hold the host until the GPU is through with the forward pass
        flags = torch.tensor(known, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        flags = flags.to(self._device, non_blocking=True)
        if self.losses:
            flags[1] = _sum(self.losses)
        if self._items:
            flags[0] += _sum(self._items)
        flags[_OWN_SQUARE] = own_square
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
        items, loss_sum, samples, more, stop, save_due, own_squares, norm = both.tolist()
        whole = round(items) if math.isfinite(items) else 0
        return Agreed(whole, loss_sum, round(samples), more > 0, stop > 0, save_due > 0, own_squares, norm)


def share_own_square(own_square: Tensor | float, world: World, device: torch.device) -> float:
    """The sum over ranks that the next window's flags would bring, to the last bit: in which order the ranks' numbers
    are added up depends on their place among others, so it is the same place among as many."""
    flags = torch.zeros(WindowTotals.BYTES // 8, dtype=torch.float64, device=device)
    flags[_OWN_SQUARE] = own_square
    if world.size > 1:
        dist.all_reduce(flags)
    return flags[_OWN_SQUARE].item()


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
