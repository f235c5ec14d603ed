"""Terms and metrics of a loss: checks, names, sums over micro-batches and ranks, and their averages."""

from __future__ import annotations

import itertools
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.loss import METRIC_NAME, RESERVED_NAMES, Loss
from launcher.quantities import count, first_names
from launcher.train.parallel.shard_units import direct_use
from launcher.train.world import World

MetricSums = Mapping[str, tuple[float | Tensor, float | Tensor]]
NO_COUNT = (
    "The items of a micro-batch must be a finite number, 0 or more: {}.\n"
    "  Return how many items the loss is a sum over (target tokens, or samples), or the sum of their weights."
)


@dataclass(frozen=True)
class LossParts:
    """Names of the parts of a loss, the same in every micro-batch.

    Args:
        terms: names of the terms, None without one; a loss of one term has one.
        metrics: names of the metrics of all terms, sorted.
    """

    terms: tuple[str | None, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, losses: Sequence[Loss]) -> Self:
        """Return those of the terms of a loss; see ``require_names``."""
        names = [name for loss in losses for name in loss.metrics]
        return cls(tuple(loss.name for loss in losses), tuple(sorted(names, key=str)))

    def require_names(self) -> None:
        """Raise TaskError if a name is not allowed, or is there twice."""
        named = [f"loss_{name}" for name in self.terms if name is not None]
        for kind, names in (("name=", [name for name in self.terms if name is not None]), ("metrics: ", self.metrics)):
            for name in names:
                if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
                    raise TaskError(
                        f"Loss({kind}{name!r}): a name has letters, digits, and any of _ . @ -, and starts with a "
                        "letter."
                    )
                if kind != "name=" and name in RESERVED_NAMES:
                    raise TaskError(
                        f"Loss(metrics: {name!r}): train/{name} is a metric of the launcher's own.\n"
                        "  Choose another name."
                    )
        logged = [*named, *self.metrics]
        if twice := [name for name in dict.fromkeys(logged) if logged.count(name) > 1]:
            raise TaskError(
                f"The terms of the loss have {first_names(twice)} twice. A name can be used once: the mean of the "
                "term NAME is logged as loss_NAME."
            )

    def difference(self, other: LossParts, of_self: str, of_other: str) -> str:
        """Return the end of a message: how ``other`` differs, and what to do."""
        if self.terms != other.terms:
            return (
                f"{of_self} has {_count_text(self)}, {of_other} {_count_text(other)}.\n"
                "  Return the same terms for every micro-batch; a term without items has total=0 and items=0."
            )
        lacks = [name for name in self.metrics if name not in other.metrics]
        if not lacks:
            of_self, of_other = of_other, of_self
            lacks = [name for name in other.metrics if name not in self.metrics]
        return (
            f"{of_other} lacks the metric {first_names(lacks)} of {of_self}.\n"
            "  Return the same metrics for every micro-batch; (0, 0) if there is nothing to count."
        )

    @property
    def plain(self) -> bool:
        """True if there is nothing but one loss: no second term, no metric, no name."""
        return self == PLAIN

    def averages(self, losses: Sequence[Sequence[float]], metrics: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the averages by name: "loss_NAME" of each named term, and those of the metrics; none where the count
        is 0.

        Args:
            losses: (sum, number of items) of each term, over all micro-batches and ranks.
            metrics: (sum, count) of each metric.
        """
        names = ["" if name is None else f"loss_{name}" for name in self.terms]
        pairs = zip([*names, *self.metrics], [*losses, *metrics], strict=True)
        return {name: total / count for name, (total, count) in pairs if name and count}


PLAIN = LossParts((None,), ())


def sum_of_means(sums: Sequence[Sequence[float]]) -> float:
    """Return the loss: the sum of the means of all terms that have items; nan if none has.

    Args:
        sums: (sum, number of items) of each term.
    """
    means = [total / items for total, items in sums if items]
    return sum(means[1:], means[0]) if means else math.nan


def metrics_of(losses: Sequence[Loss]) -> list[tuple[Any, Any]]:
    """Return the (sum, count) of each metric of all terms, in the order of ``LossParts.metrics``."""
    pairs = {name: pair for loss in losses for name, pair in loss.metrics.items()}
    return [pairs[name] for name in sorted(pairs, key=str)]


def as_terms(loss: Any, items: Any = None, metrics: Any = None) -> list[Loss]:
    """Return the terms that a loop passes to the engine: (loss_sum, items, metrics), a ``Loss``, or a list of several.

    Raises:
        TaskError: it is none of these, or a term has a wrong type or shape.
    """
    if isinstance(loss, Loss):
        losses = [loss]
    elif isinstance(loss, list | tuple) and loss and all(map(isinstance, loss, itertools.repeat(Loss))):
        losses = [*loss]
    else:
        losses = [Loss(cast("Tensor", loss), items, metrics or {})]
    require_terms(losses)
    return losses


def terms_of_forward(result: Any) -> list[Loss]:
    """Return the terms that a loop's own forward pass has returned: a tuple is (loss_sum, items) or has metrics, too.

    Raises:
        TaskError: see ``as_terms``.
    """
    if isinstance(result, tuple) and 2 <= len(result) <= 3 and not isinstance(result[0], Loss):
        return as_terms(*result)
    return as_terms(result)


def sum_of_own_means(losses: Sequence[Loss], divisor: int) -> Tensor:
    """Return the sum of the terms' means over the items of the micro-batch alone, divided by ``divisor``."""
    items = [loss.items.clamp(min=1) if isinstance(loss.items, Tensor) else max(1, loss.items) for loss in losses]
    first, *others = (loss.total / (each * divisor) for loss, each in zip(losses, items, strict=True))
    return sum(others, first)


def require_gradient(losses: Sequence[Loss]) -> None:
    """Raise TaskError if no term requires a gradient."""
    if not losses[0].total.requires_grad and not any(loss.total.requires_grad for loss in losses):
        raise TaskError(
            "The loss does not require a gradient: it was detached, made from a number, or computed under no_grad.\n"
            "  Return from loss(model, batch) what the model's output led to, without .detach(), .item() or "
            "torch.no_grad()."
        )


def require_terms(losses: Sequence[Loss]) -> None:
    """Raise TaskError if a term or a metric has a wrong type or shape. Values on a GPU are checked later, by the
    window's totals."""
    for loss in losses:
        total, items = loss.total, loss.items
        if type(total) is not Tensor or total.numel() != 1 or type(items) is not int or items < 0:
            require_sum(total, items)
        if loss.metrics:
            _require_metrics(loss.metrics)


def require_sum(loss_sum: object, items: object) -> None:
    """Raise TaskError if the two have a wrong type or shape."""
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        kind = f"of shape {list(loss_sum.shape)}" if isinstance(loss_sum, Tensor) else f"a {type(loss_sum).__name__}"
        raise TaskError(
            f"The loss of a micro-batch is {kind}, and must be a scalar tensor: the sum over its items.\n"
            '  Sum it: reduction="sum" in torch\'s losses, or .sum().'
        )
    if isinstance(loss_sum, DTensor):
        raise TaskError(direct_use("a parameter", StrategyKind.fsdp))
    require_items(items)


def require_items(items: object) -> None:
    """Raise TaskError if ``items`` is no number of items."""
    if isinstance(items, Tensor):
        if items.numel() != 1:
            raise TaskError(
                f"The items of a micro-batch are a tensor of shape {list(items.shape)}, and must be one number.\n"
                "  Sum the mask, or count the samples."
            )
        if items.requires_grad:
            raise TaskError(
                "The number of items of a micro-batch requires a gradient, and must not depend on the parameters.\n"
                "  Count targets or samples, and apply weights in the loss; or detach() the number."
            )
        _warn_if_narrow(items, "The number of items of a micro-batch is")
    # int first: the check for an abstract class is slow
    elif not (isinstance(items, int | numbers.Real) and 0 <= float(items) < math.inf):
        raise TaskError(NO_COUNT.format(f"this one has {items!r}"))


def _require_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"The metrics of a loss are a {type(metrics).__name__}, and must be a dict of (sum, count) by name."
        )
    for name, pair in metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TaskError(
                f"The metric {name!r} of the loss is {_short(pair)}, and must be (sum, count): the sum over the "
                "micro-batch, and the number of what it is a sum over."
            )
        for value in pair:
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TaskError(
                    f"The metric {name!r} of the loss has a tensor of shape {list(value.shape)}, and must be two "
                    "numbers: (sum, count).\n  Sum it over the micro-batch."
                )
            if isinstance(value, Tensor):
                _warn_if_narrow(value, f"The metric {name!r} of the loss has a sum or count")
            if not isinstance(value, Tensor | int | numbers.Real):
                raise TaskError(f"The metric {name!r} of the loss has {_short(value)}, and must be two numbers.")
        if not isinstance(pair[1], Tensor) and not 0 <= pair[1] < math.inf:
            raise TaskError(f"The count of the metric {name!r} is {pair[1]!r}, and must be a finite number, 0 or more.")


def _warn_if_narrow(number: Tensor, subject: str) -> None:
    """Warn of a number in bf16 or fp16: it was rounded before it arrived here, and averages would be wrong by that."""
    if number.is_floating_point() and number.itemsize < 4:
        exact = 2 ** (1 - round(math.log2(torch.finfo(number.dtype).eps)))
        dtype = str(number.dtype).removeprefix("torch.")
        warnings.warn(
            f"{subject} in {dtype}, which rounds whole numbers above {exact}: averages are wrong by that. Convert what "
            "is summed: mask.float().sum(), or count with integers.",
            stacklevel=2,
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


class Sums:
    """Sum and count of each term and metric of a loss, over micro-batches and then over ranks.

    Attributes:
        terms: number of terms.
        columns: sums and counts by micro-batch of this rank: those of the first term, its numbers of items, those of
            the second term, and so on; the metrics follow.
    """

    def __init__(self) -> None:
        self.resize(1, 0)

    def resize(self, terms: int, metrics: int) -> None:
        """Remove all, and let there be so many terms and metrics."""
        self.terms = terms
        self.columns: list[list[float | Tensor]] = [[] for _ in range(2 * (terms + metrics))]

    def add(self, losses: Sequence[Loss], *, metrics: bool = True) -> None:
        """Add a micro-batch that has samples. ``metrics``: they are wanted.

        Tensors are copied, because a task may write the next micro-batch's numbers into the same ones.
        """
        columns, position = self.columns, 0
        for loss in losses:
            items = loss.items
            columns[position].append(loss.total.detach().clone())
            columns[position + 1].append(items.detach().clone() if isinstance(items, Tensor) else items)
            position += 2
        if metrics and len(columns) > position:
            values = [value for pair in metrics_of(losses) for value in pair]
            for column, value in zip(columns[position:], values, strict=True):
                column.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def contribution(self) -> list[Tensor | float]:
        """Return this rank's sum and count of each; a number of items is nan if that of a micro-batch is invalid."""
        numbers: list[Tensor | float] = []
        for position, column in enumerate(self.columns):
            numbers.append(sum_of(column, valid=position % 2 == 1 and position < 2 * self.terms))
        return numbers

    def pairs(self, sums: Sequence[float]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Return (sum, number of items) of each term, and (sum, count) of each metric. ``sums``: contributions, added
        over the ranks."""
        pairs = [*zip(sums[::2], sums[1::2], strict=True)]
        return pairs[: self.terms], pairs[self.terms :]


class HeldOutSums:
    """Sums of an evaluation over the micro-batches of all ranks; the host waits for the device in ``averages`` only."""

    def __init__(self, world: World) -> None:
        self._world, self._sums = world, Sums()
        self._parts: LossParts | None = None

    def add(self, losses: Sequence[Loss], samples: int) -> None:
        """Add the loss of a micro-batch; one without samples counts nothing.

        Raises:
            TaskError: a term or metric has a wrong type or shape, or others than the micro-batches before.
        """
        require_terms(losses)
        sums = self._sums
        if self._parts is None or not self._parts.plain or len(losses) > 1 or losses[0].metrics or losses[0].name:
            parts = LossParts.of(losses)
            if self._parts is not None and parts != self._parts:
                difference = self._parts.difference(parts, "an earlier one", "this one")
                raise TaskError(f"The micro-batches of the evaluation have different losses: {difference}")
            if self._parts is None:
                parts.require_names()
                self._parts = parts
                sums.resize(len(parts.terms), len(parts.metrics))
        if samples:
            sums.add(losses)
            sums.columns = [[number] for number in sums.contribution()]

    @property
    def names(self) -> list[str]:
        """Names of the averages besides "loss", including those with nothing to count."""
        parts = self._parts or PLAIN
        return [*(f"loss_{name}" for name in parts.terms if name is not None), *parts.metrics]

    def averages(self) -> dict[str, float]:
        """Return "loss", the sum of the terms' means, and the averages of named terms and metrics, over all ranks. All
        ranks call it. Without "loss" there is no item.

        Raises:
            TaskError: the ranks have different terms or metrics, or a number of items is not finite, or negative.
        """
        everyone = self._world.of_all((self._parts, [float(number) for number in self._sums.contribution()]))
        parts = same_parts([parts for parts, _ in everyone])
        known = [numbers for own, numbers in everyone if own == parts]  # a rank without samples may have no parts
        parts = parts or PLAIN
        self._sums.terms = len(parts.terms)
        # in the order of the ranks: the same result on each of them
        terms, metrics = self._sums.pairs([sum(numbers) for numbers in zip(*known, strict=True)])
        if any(math.isnan(items) for _, items in terms):
            raise TaskError(NO_COUNT.format("that of the evaluation is not"))
        loss = {"loss": sum_of_means(terms)} if any(items > 0 for _, items in terms) else {}
        return loss | parts.averages(terms, metrics)


def same_parts(of_ranks: Sequence[LossParts | None]) -> LossParts | None:
    """Return the parts that all ranks have; None if none of them has any.

    Args:
        of_ranks: by rank; None of a rank that has seen no loss.

    Raises:
        TaskError: they differ.
    """
    known = [(rank, parts) for rank, parts in enumerate(of_ranks) if parts is not None]
    for rank, parts in known[1:]:
        first, expected = known[0]
        if parts != expected:
            difference = expected.difference(parts, f"rank {first}", f"rank {rank}")
            raise TaskError(f"The ranks return different losses: {difference}")
    return known[0][1] if known else None


def term_names(parts: LossParts | None) -> list[str]:
    """Return the terms' names for messages: those without a name are numbered."""
    terms = (None,) if parts is None else parts.terms
    return [f"term {number if name is None else name}" for number, name in enumerate(terms, 1)]


def _count_text(parts: LossParts) -> str:
    names = term_names(parts)
    return "one term" if parts.terms == (None,) else f"{count(len(names), 'term')} ({', '.join(names)})"


def explain_bad_items(counts: Sequence[Sequence[float | Tensor]], parts: LossParts | None, world: World) -> TaskError:
    """Return the error for numbers of items that are not finite, or negative. All ranks call it.

    Args:
        counts: by term and micro-batch, on this rank.
    """
    names = [f": {name}" for name in term_names(parts)]
    bad = [
        (number, name if len(counts) > 1 else "", float(count))
        for name, of_term in zip(names, counts, strict=False)
        for number, count in enumerate(of_term, 1)
        if not 0 <= float(count) < math.inf
    ]
    where = "; ".join(
        f"rank {rank}, micro-batch {number}{term} has {count:g}"
        for rank, bad_of_rank in enumerate(world.of_all(sorted(bad)))
        for number, term, count in bad_of_rank
    )
    return TaskError(NO_COUNT.format(where))


def sum_of(values: Sequence[float | Tensor], *, valid: bool = False) -> Tensor | float:
    """Return the sum of scalars in fp64, on a GPU as a tensor, for which the host does not wait.

    Args:
        valid: the values are counts; the sum is nan if one of them is not finite, or negative.
    """
    numbers: list[float] = []
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            tensors.append(value.detach())
            continue
        number = float(value) if isinstance(value, Tensor) else value
        if valid and not 0 <= number < math.inf:
            return math.nan
        numbers.append(number)
    own = float(sum(numbers))
    if not tensors:
        return own
    stacked = torch.stack([value.reshape(()).double() for value in tensors])
    if valid:
        stacked = stacked.where((stacked >= 0) & stacked.isfinite(), torch.nan)
    return stacked.sum() + own
