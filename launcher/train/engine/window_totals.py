"""Totals of a window over micro-batches and ranks, the flags that the ranks agree on, and the result of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.config.schema import Sync
from launcher.errors import NotFinite
from launcher.loss import Loss
from launcher.train.engine.loss_terms import sum_of_means
from launcher.train.engine.window_loss import WindowLoss, explain_bad_items, sum_of
from launcher.train.measure.comm_meter import CommStats, Meter
from launcher.train.measure.noise_scale import Noise
from launcher.train.measure.observer import Observer
from launcher.train.measure.straggler import Straggler, TimeSplit
from launcher.train.world import World


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one window, over all ranks.

    Args:
        step: optimizer steps taken so far, this one included unless it was skipped.
        window: index of the window in the run, from 0.
        epoch: from 0.
        loss: sum over the window's items divided by their number, of several terms the sum of these means; nan in a
            window without items, as is grad_norm.
        grad_norm: global norm of the gradient of that mean, unscaled, before clipping.
        lr: learning rate of the first parameter group in this step, whether the plan or the user's loop set it.
        samples, items: number in the window, on all ranks; items are those of the first term, and an int if they are a
            whole number.
        micro_batches: number that each rank ran.
        padding_fraction: part of the micro-batches' positions that is padding, if ``batch.balance`` measures it.
        skipped: fp16 overflowed, the window held no item, or it was not finite: parameters, schedule and step count
            are unchanged.
        nonfinite: what was not finite, if the window was skipped for that (train.on_nonfinite=skip); otherwise None.
        scale: fp16 loss scale of this window; None without scaling.
        sync: the policy of this window.
        comm: traffic of this window on this rank.
        noise: gradient noise scale from the windows before this one; None before there are enough of them.
        spent: the ranks' use of time in the previous window.
        straggler: the rank that delays the others, if there is one.
        step_s: wall seconds of the window.
        data_s: seconds of these that were spent waiting for data.
        last: no window follows.
        stopped: no window follows because a rank received a stop request.
        save_due: a checkpoint is due by rank 0's clock.
        flags_bytes: bytes that each rank passed to the small all-reduce of the window's totals and flags.
        metrics: averages of the loss's metrics over the window, in steps that train.log_every records, and the mean of
            each term NAME as "loss_NAME".
    """

    step: int
    window: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    items: float
    micro_batches: int
    padding_fraction: float | None
    skipped: bool
    nonfinite: str | None
    scale: float | None
    sync: Sync
    comm: CommStats
    noise: Noise | None
    spent: TimeSplit | None
    straggler: Straggler | None
    step_s: float
    data_s: float
    last: bool
    stopped: bool
    save_due: bool
    flags_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReducedTotals:
    """Totals and flags of a window, equal on all ranks.

    Args:
        items, loss_sum: of the loss; of several terms, the items of the first one and the sum of all.
        grad_norm: norm of the gradients before they are multiplied by C*W/N.
        terms: (loss_sum, items) of each term if there are several.
    """

    items: float
    loss_sum: float
    samples: int
    more: bool
    stop: bool
    save_due: bool
    grad_norm: float
    terms: tuple[tuple[float, float], ...] = ()

    @property
    def divisor(self) -> float:
        """N, by which the summed gradients are divided: the number of items; of several terms, the largest."""
        return max(items for _, items in self.terms) if self.terms else self.items

    @property
    def loss(self) -> float:
        """Mean over the items, or the sum of the means of several terms; nan without items."""
        if self.terms:
            return sum_of_means(self.terms)
        return self.loss_sum / self.items if self.items else math.nan


# positions of the step's own numbers in the all-reduce; those of the observers follow
_ITEMS, _LOSS, _SAMPLES, _MORE, _STOP, _SAVE_DUE, _OUT_OF_MEMORY, _FLAGS = range(8)


class WindowTotals:
    """Sums over a window, and the one small all-reduce of sums and flags.

    The all-reduce starts before the last backward pass and is received after it, so that the two overlap. This is the
    only place where the host waits for the device in a window.

    Args:
        meter: records how long the all-reduce blocks the host.
        loss: terms and metrics of the loss, the last of the observers.
        observers: their numbers are summed too.

    Attributes:
        losses: loss sums of this rank's micro-batches.
    """

    def __init__(
        self, world: World, device: torch.device, meter: Meter, loss: WindowLoss, observers: Sequence[Observer]
    ) -> None:
        self._world, self._device, self._meter, self._loss = world, device, meter, loss
        self._observers = [*observers, loss]
        self.clear()

    @property
    def payload_bytes(self) -> int:
        """Bytes that a rank passes to the all-reduce, and to that of the items that are counted ahead."""
        return 8 * self._ends[-1] + self._loss.counted_bytes if self._world.size > 1 else 0

    @property
    def _ends(self) -> list[int]:
        """Position of each observer's first number, and the total width. The ranks agree on that of the loss."""
        return [*itertools.accumulate((observer.width for observer in self._observers), initial=_FLAGS)]

    def clear(self, *, metrics: bool = True) -> None:
        """Start a window. ``metrics``: those of the loss are wanted."""
        self._loss.clear(due=metrics)
        self.losses: list[Tensor] = []
        self._items: list[float | Tensor] = []  # numbers of items of this rank's micro-batches
        self._samples = 0
        self._shared: Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, losses: Sequence[Loss], samples: int) -> None:
        """Add a micro-batch that has samples."""
        self._items.append(losses[0].items)
        self.losses.append(losses[0].total.detach())
        self._samples += samples
        self._loss.add(losses)

    def losses_by_term(self) -> Sequence[Sequence[Tensor]]:
        """Return the loss sums of this rank's micro-batches, each by term."""
        return self._loss.own_totals or [[loss] for loss in self.losses]

    def own_part(self) -> tuple[Tensor | float, int]:
        """Return the items and samples of this rank so far; the host does not wait for a GPU."""
        return sum_of(self._items), self._samples

    def send(self, *, more: bool, stop: bool, save_due: bool) -> None:
        """Start the all-reduce. ``more``: this rank has samples for another window."""
        shares = [number for observer in self._observers for number in observer.contribution()]
        # an invalid number of items makes the sum nan on every rank, which needs neither a separate flag nor the host
        items, loss_sum = sum_of(self._items, valid=True), sum_of(self.losses)
        values = [items, loss_sum, self._samples, more, stop, save_due, False, *shares]  # of _ITEMS, _LOSS, ...
        if self._device.type == "cpu":
            flags = torch.tensor([float(value) for value in values], dtype=torch.float64)
        else:
            computed = {position: value for position, value in enumerate(values) if isinstance(value, Tensor)}
            known = [0.0 if isinstance(value, Tensor) else value for value in values]
            # from pinned memory: an ordinary copy would block the host until the GPU has completed the forward pass
            flags = torch.tensor(known, dtype=torch.float64, pin_memory=True).to(self._device, non_blocking=True)
            for position, value in computed.items():
                flags[position] = value
        self._all_reduce(flags)

    def send_out_of_memory(self) -> None:
        """Start the all-reduce on a rank that cannot complete its window, without the observers, which may need
        memory."""
        flags = torch.zeros(self._ends[-1], dtype=torch.float64, device=self._device)
        flags[_OUT_OF_MEMORY] = 1
        self._all_reduce(flags)

    def _all_reduce(self, flags: Tensor) -> None:
        if self._world.size > 1:
            self._work = dist.all_reduce(flags, async_op=True)
        self._shared = flags

    @property
    def sent(self) -> bool:
        """True from the start of the all-reduce until the next window."""
        return self._shared is not None

    def items_by_term(self) -> list[float]:
        """Wait for the all-reduce, and return each term's number of items in the window on all ranks; 0 for a number
        that is not finite, which ``receive`` reports."""
        sums = self._arrived()
        start = self._ends[-2]
        items = self._loss.items_of_terms(sums[_ITEMS].item(), sums[start:].tolist() if self._loss.several else ())
        return [whole(number) if math.isfinite(number) else 0 for number in items]

    def divisor_of_all(self) -> float:
        """Wait for the all-reduce, and return the window's N, see ``ReducedTotals.divisor``."""
        return max(self.items_by_term())

    def out_of_memory(self) -> bool:
        """Wait for the all-reduce, and return whether a rank is out of memory."""
        return self._arrived()[_OUT_OF_MEMORY].item() > 0

    def _arrived(self) -> Tensor:
        assert self._shared is not None
        if self._work is not None:
            with self._meter.waiting():
                self._work.wait()
        return self._shared

    def receive(self, grad_norm: Tensor) -> ReducedTotals:
        """Wait for the all-reduce, pass their sums to the observers, and return the rest.

        Raises:
            TaskError: a number of items is not finite, or negative; on all ranks.
        """
        sums = self._arrived().tolist()
        if not math.isfinite(sums[_ITEMS]):
            raise explain_bad_items([[items] for items in self._items], [""], self._world)
        for observer, (start, end) in zip(self._observers, itertools.pairwise(self._ends), strict=True):
            observer.receive(sums[start:end])
        terms = self._loss.complete((sums[_LOSS], sums[_ITEMS]))
        loss_sum = sum(total for total, _ in terms) if terms else sums[_LOSS]
        flags = (sums[_MORE] > 0, sums[_STOP] > 0, sums[_SAVE_DUE] > 0)
        return ReducedTotals(whole(sums[_ITEMS]), loss_sum, round(sums[_SAMPLES]), *flags, grad_norm.item(), terms)

    def sum_of(self, observer: Observer) -> list[float]:
        """Return the sums that ``observer`` would receive with the next window. All ranks call it.

        The other positions are filled with zeros: the order in which a ring all-reduce adds the ranks' numbers, and so
        the last bit of a sum, depends on the position.
        """
        start = self._ends[self._observers.index(observer)]
        flags = torch.zeros(self._ends[-1], dtype=torch.float64, device=self._device)
        for position, value in enumerate(observer.contribution(), start):
            flags[position] = value
        if self._world.size > 1:
            dist.all_reduce(flags)
        return flags[start : start + observer.width].tolist()


def whole(number: float) -> float:
    """Return a whole number as an int, any other unchanged."""
    return int(number) if number.is_integer() else number


def explain_bad_loss(totals: WindowTotals, samples: Callable[[int], str], world: World, step: int) -> NotFinite:
    """Return the error for a loss that is not finite, with its ranks and micro-batches. All ranks call it.

    Args:
        samples: returns the text on the samples of a micro-batch, by its number from 1.
    """
    micro_batches = totals.losses_by_term()
    bad = [n + 1 for n, terms in enumerate(micro_batches) if not all(torch.isfinite(loss).item() for loss in terms)]
    numbers = [str(number) for number in bad]
    if bad and (text := samples(bad[0])):
        numbers[0] += f" ({text})"
    where = "; ".join(
        f"rank {rank}, micro-batch {', '.join(numbers_of_rank)}"
        for rank, numbers_of_rank in enumerate(world.of_all(numbers))
        if numbers_of_rank
    )
    if any(loss.dtype is torch.float16 for terms in micro_batches for loss in terms):
        where += "; it is summed in float16, which ends at 65504: call .float() before the sum"
    return NotFinite(
        f"The loss of step {step} is not finite (inf or nan): {where or 'only its sum overflows'}.\n"
        "  Nothing was applied. Try a lower optimizer.lr, a longer schedule.warmup_steps, a lower train.clip_norm, or "
        "precision=fp32. If it is one of the first steps, check the data and the loss of that micro-batch."
    )
