"""Totals of a window over micro-batches and ranks, the flags that the ranks agree on, and the result of a step."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from launcher import quantities
from launcher.config.schema import Sync
from launcher.errors import NotFinite, TaskError
from launcher.loss import Loss
from launcher.train.engine.loss_terms import (
    LossParts,
    Sums,
    explain_bad_items,
    require_items,
    same_parts,
    sum_of,
    sum_of_means,
    term_names,
)
from launcher.train.measure.comm_meter import CommStats, Meter
from launcher.train.measure.observer import Observer
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
        items: number of items; of several terms, that of the first one.
        denominator: N, by which the summed gradients are divided: the number of items; of several terms, the largest.
        loss_sum: of all terms.
        loss: mean over the items, or the sum of the means of several terms; nan without items.
        grad_norm: norm of the gradients before they are multiplied by C*W/N.
    """

    items: float
    denominator: float
    loss_sum: float
    loss: float
    samples: int
    more: bool
    stop: bool
    save_due: bool
    grad_norm: float


# relative difference between a number counted ahead and that of the window: weights may be summed in another order
_SAME_COUNT = 1e-6


class WindowLoss:
    """Terms and metrics of the loss. A loss of one term without metrics has no numbers here.

    Each term has a denominator of its own, its number of items in the window on all ranks: N_1, N_2, ... The gradient
    of

        L_1 / N_1 + L_2 / N_2 + ...        (L_j: sum of term j over the window)

    is one backward pass for each micro-batch on the sum of its terms, term j multiplied by N / (C N_j), with N the
    largest N_j; the optimizer step then multiplies by C / N, as for a loss of one term. So the N_j must be known before
    the first backward pass of a window: a window of one micro-batch has them from its totals, which are sent before its
    backward pass; in others the items are counted ahead (see ``CurrentWindow``). The sums of the window itself must
    then be those that were counted.

    Attributes:
        parts: names of terms and metrics, the same on all ranks; None before the first micro-batch of this process.
        plain: known to be one term without name and metrics.
        several: several terms, as far as known.
        counted: number of items of each term in the window on all ranks, counted ahead; None if they were not.
        due: metrics of this window are wanted.
        counted_bytes: that a rank passed to the all-reduce of these.
        averages: averages of the latest window by name, see ``LossParts.averages``.
        sums: those of the window.
    """

    def __init__(self, world: World, device: torch.device, meter: Meter) -> None:
        self._world, self._device, self._meter = world, device, meter
        self.parts: LossParts | None = None
        self.plain, self.several, self.sums = False, False, Sums()
        self.clear()

    def clear(self, *, due: bool = True) -> None:
        """Start a window. ``due``: its metrics are wanted; otherwise they are neither kept nor summed."""
        self.due = due
        self.counted: list[float] | None = None
        self.counted_bytes = 0
        self.averages: dict[str, float] = {}
        self._own_counts: list[list[float | Tensor]] = []
        for column in self.sums.columns:
            column.clear()

    def agree(self, losses: Sequence[Loss] | None, samples: int) -> float:
        """Agree on the names of terms and metrics, and return the largest number of items of any rank and term. All
        ranks call it in the first micro-batch of a process.

        Args:
            losses: the terms; None on a rank that ran out of memory in this micro-batch.
            samples: of the micro-batch.

        Raises:
            TaskError: a name is not allowed, or the ranks' names differ; on all ranks.
        """
        parts = None if losses is None else LossParts.of(losses)
        most = torch.full((5,), -math.inf, dtype=torch.float64, device=self._device)
        most[0] = 0.0
        if losses is not None and parts is not None:
            mark = float(zlib.crc32(repr(parts).encode()))
            most[1:] = torch.tensor([mark, -mark, len(parts.terms), len(parts.metrics)], dtype=torch.float64)
            for loss in losses if samples else ():
                most[0] = most[0].maximum(torch.as_tensor(loss.items, dtype=torch.float64, device=self._device))
        if self._world.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        items, mark, other, terms, metrics = most.tolist()
        if mark != -other:  # the largest and the smallest mark of all ranks
            same_parts(self._world.of_all(parts))
        if parts is not None:
            parts.require_names()
        self.parts, self.plain = parts, parts is not None and parts.plain
        if math.isfinite(terms):
            self.sums.resize(int(terms), int(metrics))
            self.several = terms > 1
        return items

    def forget(self) -> None:
        """Let the ranks agree again in the next micro-batch: one of them may not know the names yet."""
        self.parts, self.plain, self.several = None, False, False

    def require_parts(self, losses: Sequence[Loss]) -> None:
        """Raise TaskError if the terms or metrics are not those that the ranks have agreed on."""
        parts = self.parts
        assert parts is not None
        if (own := LossParts.of(losses)) != parts:
            raise TaskError(
                f"A micro-batch of rank {self._world.rank} has another loss than the first one: "
                f"{parts.difference(own, 'the first one', 'this one')}"
            )

    def count(self, items: Sequence[float | Tensor]) -> None:
        """Add the items of a micro-batch, by term, before the window's first backward pass.

        Raises:
            TaskError: there are not as many numbers as terms.
        """
        if not isinstance(items, list | tuple) or len(items) != self.sums.terms:
            given = (
                quantities.count(len(items), "number")
                if isinstance(items, list | tuple)
                else f"a {type(items).__name__}"
            )
            raise TaskError(
                f"items(batch) returned {given} for a loss of {self.sums.terms} terms.\n"
                "  Return a list with the number of items of each term, in the order of the terms."
            )
        for number in items:
            require_items(number)
        self._own_counts.append([item.clone() if isinstance(item, Tensor) else item for item in items])  # see Sums.add

    def share_counts(self, *, out_of_memory: bool = False) -> bool:
        """Set ``counted`` from the counts of all ranks. All ranks call it before the window's first backward pass.

        Args:
            out_of_memory: this rank could not complete its count.

        Returns:
            False if a rank ran out of memory.

        Raises:
            TaskError: a number of items is not finite, or negative; on all ranks.
        """
        counts = torch.zeros(self.sums.terms + 1, dtype=torch.float64, device=self._device)
        counts[-1] = out_of_memory
        for term in range(0 if out_of_memory else self.sums.terms):
            counts[term] = sum_of([items[term] for items in self._own_counts], valid=True)
        if self._world.size > 1:
            self.counted_bytes = counts.nbytes
            with self._meter.waiting():
                dist.all_reduce(counts)
        *items, failed = counts.tolist()
        if failed:
            return False
        if not all(map(math.isfinite, items)):
            raise explain_bad_items([*zip(*self._own_counts, strict=True)], self.parts, self._world)
        self.counted = items
        return True

    def weighted(self, losses: Sequence[Loss], weight: float, items: Sequence[float]) -> Tensor:
        """Return the scalar of a micro-batch's backward pass.

        Args:
            weight: factor of the term with the largest number of items.
            items: number of items of each term in the window on all ranks; not needed for one term.
        """
        if len(losses) == 1:
            return losses[0].total * weight
        largest = max(items)
        factors = [weight * (largest / number) if number else 0.0 for number in items]
        first, *others = (loss.total * factor for loss, factor in zip(losses, factors, strict=True))
        return sum(others, first)

    def receive(self, sums: Sequence[float]) -> list[tuple[float, float]]:
        """Return (loss_sum, items) of each term over the window and all ranks, and set ``averages``.

        Args:
            sums: contributions of ``sums``, added over the ranks.

        Raises:
            TaskError: a number of items is not finite, negative, or not the one counted ahead; or a metric's count is
                not finite, or negative. On all ranks.
        """
        terms, metrics = ([(sums[0], sums[1])], []) if self.plain else self.sums.pairs(sums)
        if not all(map(math.isfinite, sums[1 : 2 * len(terms) : 2])):
            raise explain_bad_items(self.sums.columns[1 : 2 * len(terms) : 2], self.parts, self._world)
        if self.plain:
            return terms
        assert self.parts is not None
        for name, (_, count) in zip(self.parts.metrics, metrics, strict=True):
            if not 0 <= count < math.inf:
                raise TaskError(
                    f"The count of the metric {name} is {count:g} over all ranks, and must be a finite number, 0 or "
                    "more.\n  Return (sum, count) with the number of what it is a sum over."
                )
        if self.counted is not None:
            self._require_counted([items for _, items in terms])
        self.averages = self.parts.averages(terms, metrics)
        return terms

    def _require_counted(self, items: Sequence[float]) -> None:
        assert self.parts is not None
        assert self.counted is not None
        for name, ahead, now in zip(term_names(self.parts), self.counted, items, strict=True):
            if abs(ahead - now) > _SAME_COUNT * max(ahead, now) or (
                float(ahead).is_integer() and abs(ahead - now) > 0.5
            ):
                raise TaskError(
                    f"The loss's {name} had {ahead:g} items in this window when they were counted before its first "
                    f"backward pass, and {now:g} in the window itself. Nothing was applied.\n"
                    "  The number of items must not depend on random numbers (dropout) or on state that changes. Give "
                    "the task a method items(batch) that returns the numbers of a micro-batch, or use "
                    "batch.accumulation=1, where nothing is counted ahead."
                )


# positions of the flags in the all-reduce; the numbers of the observers follow, and then those of the loss
_SAMPLES, _MORE, _STOP, _SAVE_DUE, _OUT_OF_MEMORY, _FLAGS = range(6)


class WindowTotals:
    """Sums over a window, and the one small all-reduce of sums and flags.

    The all-reduce starts before the last backward pass and is received after it, so that the two overlap. In a plain
    window of DDP in bf16 or fp32, the host waits for the device here alone.

    Args:
        meter: records how long the all-reduce blocks the host.
        loss: terms and metrics of the loss, whose numbers are the last ones.
        observers: their numbers are summed too.

    Attributes:
        samples: of this rank's micro-batches so far; the engine counts them.
        sent: from the start of the all-reduce until the next window.
        payload_bytes: that a rank passes to the all-reduce, and to that of the items that are counted ahead.
    """

    def __init__(
        self, world: World, device: torch.device, meter: Meter, loss: WindowLoss, observers: Sequence[Observer]
    ) -> None:
        self._world, self._device, self._meter, self._loss = world, device, meter, loss
        self._observers = [observer for observer in observers if observer.width]
        # position of each observer's first number, and of the first one of the loss
        self._ends = [*itertools.accumulate((observer.width for observer in self._observers), initial=_FLAGS)]
        self.clear()

    @property
    def _width(self) -> int:
        """Number of all numbers. The ranks agree on that of the loss."""
        return self._ends[-1] + len(self._loss.sums.columns)

    def clear(self, *, metrics: bool = True) -> None:
        """Start a window. ``metrics``: those of the loss are wanted."""
        self._loss.clear(due=metrics)
        self.samples = 0
        self._shared: Tensor | None = None
        self.sent, self.payload_bytes = False, 0
        self._work: dist.Work | None = None

    def losses_by_term(self) -> Sequence[Sequence[Tensor]]:
        """Return the loss sums of this rank's micro-batches, each by term."""
        sums = self._loss.sums
        return cast("Sequence[Sequence[Tensor]]", [*zip(*sums.columns[: 2 * sums.terms : 2], strict=True)])

    def own_part(self) -> tuple[Tensor | float, int]:
        """Return the items and samples of this rank so far; the host does not wait for a GPU."""
        return sum_of(self._loss.sums.columns[1]), self.samples

    def send(self, *, more: bool, stop: bool, save_due: bool) -> None:
        """Start the all-reduce. ``more``: this rank has samples for another window."""
        # an invalid number of items makes the sum nan on every rank, which needs neither a separate flag nor the host
        values: list[Tensor | float] = [self.samples, more, stop, save_due, False]  # of _SAMPLES, ...
        for observer in self._observers:
            values += observer.contribution()
        values += self._loss.sums.contribution()
        if self._device.type == "cpu":
            flags = torch.tensor([*map(float, values)], dtype=torch.float64)
        else:
            computed = {position: value for position, value in enumerate(values) if isinstance(value, Tensor)}
            known = [0.0 if isinstance(value, Tensor) else value for value in values]
            # from pinned memory: an ordinary copy would block the host until the GPU has completed the forward pass
            flags = torch.tensor(known, dtype=torch.float64, pin_memory=True).to(self._device, non_blocking=True)
            for position, value in computed.items():
                flags[position] = value
        self.payload_bytes = self._loss.counted_bytes + flags.nbytes if self._world.size > 1 else 0
        self._all_reduce(flags)

    def send_out_of_memory(self) -> None:
        """Start the all-reduce on a rank that cannot complete its window, without the observers, which may need
        memory."""
        flags = torch.zeros(self._width, dtype=torch.float64, device=self._device)
        flags[_OUT_OF_MEMORY] = 1
        self._all_reduce(flags)

    def _all_reduce(self, flags: Tensor) -> None:
        if self._world.size > 1:
            self._work = dist.all_reduce(flags, async_op=True)
        self._shared, self.sent = flags, True

    def items_by_term(self) -> list[float]:
        """Wait for the all-reduce, and return each term's number of items in the window on all ranks; 0 for a number
        that is not finite, which ``receive`` reports."""
        terms, _ = self._loss.sums.pairs(self._arrived()[self._ends[-1] :].tolist())
        return [int_if_whole(items) if math.isfinite(items) else 0 for _, items in terms]

    def denominator(self) -> float:
        """Wait for the all-reduce, and return the window's N, see ``ReducedTotals.denominator``."""
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
        terms = self._loss.receive(sums[self._ends[-1] :])
        for observer, start in zip(self._observers, self._ends, strict=False):
            observer.receive(sums[start : start + observer.width])
        loss_sum, items = terms[0][0], int_if_whole(terms[0][1])
        denominator, loss = items, loss_sum / items if items else math.nan
        if len(terms) > 1:
            loss_sum, loss = sum(total for total, _ in terms), sum_of_means(terms)
            denominator = int_if_whole(max(number for _, number in terms))
        flags = (sums[_MORE] > 0, sums[_STOP] > 0, sums[_SAVE_DUE] > 0)
        return ReducedTotals(items, denominator, loss_sum, loss, round(sums[_SAMPLES]), *flags, grad_norm.item())

    def sum_of(self, observer: Observer) -> list[float]:
        """Return the sums that ``observer`` would receive with the next window. All ranks call it.

        The other positions are filled with zeros: the order in which a ring all-reduce adds the ranks' numbers, and so
        the last bit of a sum, depends on the position.
        """
        start = self._ends[self._observers.index(observer)]
        flags = torch.zeros(self._width, dtype=torch.float64, device=self._device)
        for position, value in enumerate(observer.contribution(), start):
            flags[position] = value
        if self._world.size > 1:
            dist.all_reduce(flags)
        return flags[start : start + observer.width].tolist()


def int_if_whole(number: float) -> float:
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
