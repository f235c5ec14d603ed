"""Loss of several terms, or with metrics: what the ranks agree on, and the sums of a window.

Each term has a denominator of its own, its number of items in the window on all ranks: N_1, N_2, ... The gradient of

    L_1 / N_1 + L_2 / N_2 + ...        (L_j: sum of term j over the window)

is one backward pass for each micro-batch on the sum of its terms, each multiplied by N / N_j, with N the largest N_j;
the optimizer step then divides by N, as it divides the only term of a usual loss by its number of items. So the N_j
must be known before the first backward pass of a window: a window of one micro-batch has them from its totals, which
are sent before its backward pass; in others the items are counted ahead (see ``CurrentWindow``). The sums of the window
itself must then be those that were counted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher import quantities
from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.train.engine.loss_terms import NO_COUNT, LossParts, metrics_of, require_items, same_parts, term_names
from launcher.train.measure.comm_meter import Meter
from launcher.train.measure.observer import EndedWindow
from launcher.train.world import World

# relative difference between a number counted ahead and that of the window: weights may be summed in another order
_SAME_COUNT = 1e-6


class WindowLoss:
    """Observer of the terms and metrics of the loss. For a loss of one term without metrics it has no numbers.

    Attributes:
        parts: names of terms and metrics, the same on all ranks; None before the first micro-batch of this process.
        counted: number of items of each term in the window on all ranks, counted ahead; None if they were not.
        averages: averages of the latest window by name, see ``LossParts.averages``.
    """

    def __init__(self, world: World, device: torch.device, meter: Meter) -> None:
        self._world, self._device, self._meter = world, device, meter
        self.parts: LossParts | None = None
        self._terms, self._metrics, self._plain = 1, 0, False
        self.clear()

    def clear(self, *, due: bool = True) -> None:
        """Start a window. ``due``: its metrics are wanted; otherwise they are neither kept nor summed."""
        self._due = due
        self.counted: list[float] | None = None
        self.averages: dict[str, float] = {}
        self._own_counts: list[list[float | Tensor]] = []
        self._totals: list[list[Tensor]] = []
        self._items: list[list[float | Tensor]] = []
        self._pairs: list[Sequence[tuple[float | Tensor, float | Tensor]]] = []
        self._sums: Sequence[float] = ()

    @property
    def several(self) -> bool:
        """True if the loss has several terms, as far as known."""
        return self._terms > 1

    @property
    def width(self) -> int:
        return 2 * (self._terms - 1) + 2 * self._metrics

    @property
    def counted_bytes(self) -> int:
        """Bytes that a rank passed to the all-reduce of the window's items that were counted ahead."""
        return 8 * (self._terms + 1) if self.counted is not None and self._world.size > 1 else 0

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
        if mark != -other:
            same_parts(self._world.of_all(parts))
        if parts is not None:
            parts.require_names()
        self.parts, self._plain = parts, parts is not None and parts.plain
        if math.isfinite(terms):
            self._terms, self._metrics = int(terms), int(metrics)
        return items

    def forget(self) -> None:
        """Let the ranks agree again in the next micro-batch: one of them may not know the names yet."""
        self.parts, self._plain = None, False

    def require_parts(self, losses: Sequence[Loss]) -> None:
        """Raise TaskError if the terms or metrics are not those that the ranks have agreed on."""
        if self._plain and len(losses) == 1 and not losses[0].metrics and losses[0].name is None:
            return
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
        if not isinstance(items, list | tuple) or len(items) != self._terms:
            given = (
                quantities.count(len(items), "number")
                if isinstance(items, list | tuple)
                else f"a {type(items).__name__}"
            )
            raise TaskError(
                f"items(batch) returned {given} for a loss of {self._terms} terms.\n"
                "  Return a list with the number of items of each term, in the order of the terms."
            )
        for number in items:
            require_items(number)
        self._own_counts.append([*items])

    def share_counts(self, *, out_of_memory: bool = False) -> bool:
        """Set ``counted`` from the counts of all ranks. All ranks call it before the window's first backward pass.

        Args:
            out_of_memory: this rank could not complete its count.

        Returns:
            False if a rank ran out of memory.

        Raises:
            TaskError: a number of items is not finite, or negative; on all ranks.
        """
        counts = torch.zeros(self._terms + 1, dtype=torch.float64, device=self._device)
        counts[-1] = out_of_memory
        for term in range(0 if out_of_memory else self._terms):
            counts[term] = sum_of([items[term] for items in self._own_counts], valid=True)
        if self._world.size > 1:
            with self._meter.waiting():
                dist.all_reduce(counts)
        *items, failed = counts.tolist()
        if failed:
            return False
        if not all(map(math.isfinite, items)):
            raise self._explain_bad_items(self._own_counts)
        self.counted = items
        return True

    def add(self, losses: Sequence[Loss]) -> None:
        """Add a micro-batch that has samples."""
        if self._terms > 1:
            self._totals.append([loss.total.detach() for loss in losses])
            self._items.append([loss.items for loss in losses])
        if self._metrics and self._due:
            self._pairs.append([(_detached(total), _detached(count)) for total, count in metrics_of(losses)])

    @property
    def own_totals(self) -> Sequence[Sequence[Tensor]]:
        """Loss sums of this rank's micro-batches, by term; empty for a loss of one term."""
        return self._totals

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

    def contribution(self) -> Sequence[Tensor | float]:
        numbers: list[Tensor | float] = []
        for term in range(1, self._terms):
            numbers.append(sum_of([items[term] for items in self._items], valid=True))
            numbers.append(sum_of([totals[term] for totals in self._totals]))
        for metric in range(self._metrics):
            for place in (0, 1):
                numbers.append(sum_of([pairs[metric][place] for pairs in self._pairs]))
        return numbers

    def items_of_terms(self, first: float, sums: Sequence[float]) -> list[float]:
        """Return the number of items of each term on all ranks. ``first``: that of the first term."""
        return [first, *sums[: 2 * (self._terms - 1) : 2]]

    def receive(self, sums: Sequence[float]) -> None:
        self._sums = sums

    def complete(self, first: tuple[float, float]) -> tuple[tuple[float, float], ...]:
        """Return (loss_sum, items) of each term over the window and all ranks if there are several, and set
        ``averages``. Called after ``receive``.

        Args:
            first: those of the first term.

        Raises:
            TaskError: a number of items is not finite, negative, or not the one counted ahead; or a metric's count is
                not finite, or negative. On all ranks.
        """
        if self._plain:
            return ()
        numbers, split = self._sums, 2 * (self._terms - 1)
        others = zip(numbers[1:split:2], numbers[:split:2], strict=True)
        terms = (first, *((total, items) for total, items in others))
        metrics = list(zip(numbers[split::2], numbers[split + 1 :: 2], strict=True))
        if not all(math.isfinite(items) for _, items in terms):
            raise self._explain_bad_items(self._items)
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
        return terms if self._terms > 1 else ()

    def window_ended(self, window: EndedWindow) -> None: ...

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

    def _explain_bad_items(self, counts: Sequence[Sequence[float | Tensor]]) -> TaskError:
        return explain_bad_items(counts, [f": {name}" for name in term_names(self.parts)], self._world)


def explain_bad_items(counts: Sequence[Sequence[float | Tensor]], names: Sequence[str], world: World) -> TaskError:
    """Return the error for numbers of items that are not finite, or negative. All ranks call it.

    Args:
        counts: by micro-batch and term, on this rank.
        names: text that follows the number of the micro-batch, for each term.
    """
    bad = [
        (number, term, float(count))
        for number, items in enumerate(counts, 1)
        for term, count in enumerate(items)
        if not 0 <= float(count) < math.inf
    ]
    where = "; ".join(
        f"rank {rank}, micro-batch {number}{names[term]} has {count:g}"
        for rank, bad_of_rank in enumerate(world.of_all(bad))
        for number, term, count in bad_of_rank
    )
    return TaskError(NO_COUNT.format(where))


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def sum_of(values: Sequence[float | Tensor], *, valid: bool = False) -> Tensor | float:
    """Return the sum of scalars in fp64, on a GPU as a tensor, for which the host does not wait.

    Args:
        valid: the values are counts; the sum is nan if one of them is not finite, or negative.
    """
    numbers = [value for value in values if not isinstance(value, Tensor)]
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    if tensors and tensors[0].device.type == "cpu":
        numbers += [float(value) for value in tensors]
        tensors = []
    if valid and not all(0 <= number < math.inf for number in numbers):
        return math.nan
    own = float(sum(numbers))
    if not tensors:
        return own
    stacked = torch.stack([value.reshape(()).double() for value in tensors])
    if valid:
        stacked = stacked.where((stacked >= 0) & stacked.isfinite(), torch.nan)
    return stacked.sum() + own
