"""Division of a window's samples into micro-batches by their lengths (``batch.balance=length``), and these lengths.

Which samples a window holds does not change, so the gradient does not either. Its samples are sorted by length and cut
into micro-batches, so that samples which are padded to the same length have alike lengths. The n-th micro-batches of
all ranks are neighbours in that order, because FSDP and sync=every wait for the slowest rank in each micro-batch. Of
these, the longest goes to the rank that has computed least so far (longest processing time first: R. L. Graham, "Bounds
on Multiprocessing Timing Anomalies", 1969), because all wait for the slowest rank at the boundary.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from launcher.config.schema import Balance
from launcher.errors import DataError
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.task import Task, column_of_lengths, is_mapped
from launcher.train.data.loader import prefetch
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.sample_order import ArrangedData, Order, checked_lengths
from launcher.train.world import World

# lengths of a micro-batch's samples, longest first -> its tokens
TokensOf = Callable[[Sequence[float]], float]
# samples that a loader process reads for one answer
_AT_ONCE = 64


class BalancedWindow(NamedTuple):
    """Micro-batches of a window.

    Args:
        offsets: by rank and micro-batch: offsets into the window, longest sample first.
        stand_in: offset of the shortest sample, which a rank without samples runs with weight zero.
        padding_fraction: part of all positions of the micro-batches that is padding if each one is padded to its
            longest sample: 1 - sum of lengths / sum of (samples x longest). It says nothing about packed rows.
    """

    offsets: list[list[list[int]]]
    stand_in: int
    padding_fraction: float


def tokens_padded(lengths: Sequence[float]) -> float:
    """Return the tokens of a micro-batch of samples of these lengths that is padded to its longest sample."""
    return len(lengths) * max(lengths)


def balanced(lengths: Sequence[float], batch: Batch, tokens_of: TokensOf = tokens_padded) -> BalancedWindow:
    """Divide a window into micro-batches of alike lengths, the longest first.

    Every rank gets the same number of micro-batches, as few as can hold the window; their sizes differ by at most one,
    unless batch.micro_tokens bounds them.

    Args:
        lengths: of the window's samples.
        tokens_of: tokens of a micro-batch by the lengths of its samples, longest first, for batch.micro_tokens.
    """
    ordered = sorted(range(len(lengths)), key=lambda offset: -lengths[offset])  # stable: the same on all ranks
    if batch.micro_tokens is None:
        rounds = -(-len(lengths) // batch.unit)
        cuts = _cuts(len(lengths), rounds * batch.world_size)
        parts = [ordered[start:stop] for start, stop in itertools.pairwise(cuts)]
    else:
        parts = _bounded(ordered, lengths, batch, batch.micro_tokens, tokens_of)
    padded = [len(part) * lengths[part[0]] if part else 0 for part in parts]
    loads = [0.0] * batch.world_size
    offsets: list[list[list[int]]] = [[] for _ in loads]
    for start in range(0, len(parts), batch.world_size):
        ranks = sorted(range(batch.world_size), key=lambda rank: loads[rank])
        numbers = sorted(range(start, start + batch.world_size), key=lambda number: -padded[number])
        for rank, number in zip(ranks, numbers, strict=True):
            offsets[rank].append(parts[number])
            loads[rank] += padded[number]
    total = sum(padded)
    return BalancedWindow(offsets, ordered[-1], 1 - sum(lengths) / total if total else 0.0)


def _bounded(
    ordered: list[int], lengths: Sequence[float], batch: Batch, bound: int, tokens_of: TokensOf
) -> list[list[int]]:
    """Return the sorted samples in parts of at most ``bound`` tokens, as few as possible, and equally many for each
    rank: the largest parts are halved for ranks that would have none."""
    parts: list[list[int]] = []
    rest = ordered
    while rest:
        size = _most_within(bound, [lengths[offset] for offset in rest[: batch.micro_size]], tokens_of)
        parts.append(rest[:size])
        rest = rest[size:]
    for _ in range(-len(parts) % batch.world_size):
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        half = -(-len(parts[largest]) // 2)
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    parts.sort(key=lambda part: not part)  # ranks without samples come last
    return parts


def _most_within(bound: int, lengths: Sequence[float], tokens_of: TokensOf) -> int:
    """Return how many of the first samples, at least one, are a micro-batch of at most ``bound`` tokens."""
    more = range(2, len(lengths) + 1)
    return 1 + bisect.bisect_left(more, 1, key=lambda n: tokens_of(sorted(lengths[:n], reverse=True)) > bound)


def first_within_bound(data: Any, task: Task, plan: RunPlan) -> int:
    """Return how many of the first samples are one micro-batch: ``batch.micro_size``, or what its tokens permit."""
    size, bound = plan.batch.micro_size, plan.batch.micro_tokens
    if bound is None:
        return size
    size = min(size, len(data))
    if (lengths := _known_lengths(data, task)) is None:
        lengths = _LengthReader(data, getattr(task, "length"), plan.train.seed)[range(size)][0]  # noqa: B009
    tokens_of = tokens_function(getattr(task, "micro_batch_tokens", None), getattr(task, "collate", None))
    return _most_within(bound, [float(length) for length in lengths[:size]], tokens_of)


def tokens_function(own: TokensOf | None, collate: Any) -> TokensOf:
    """Return the function that counts a micro-batch's tokens: the task's own, or that of its collate function."""
    if own is None:
        return getattr(collate, "micro_batch_tokens", tokens_padded)

    def checked(lengths: Sequence[float]) -> float:
        tokens: Any = own(lengths)
        try:
            value = float(tokens)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not 0 <= value < math.inf:  # nan would exceed no bound
            raise DataError(
                f"micro_batch_tokens(lengths) returned {tokens!r} for {count(len(lengths), 'sample')}, the longest of "
                f"length {max(lengths):,.0f}.\n  Return the tokens of such a micro-batch: one number of at least 0."
            )
        return value

    return checked


def _cuts(samples: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` parts of the sorted samples; the smaller ones first, where samples are longest."""
    base, more = divmod(samples, parts)
    sizes = [base] * (parts - more) + [base + 1] * more
    if not base:  # fewer samples than ranks
        sizes.reverse()
    return [0, *itertools.accumulate(sizes)]


def arranged(data: Any, task: Task, plan: RunPlan, world: World) -> Any:
    """Return the training data with the order and the lengths that its task has for it. All ranks call it.

    Raises:
        DataError: the lengths are no lengths of the data.
    """
    balance = plan.batch.balance is Balance.length
    if not is_mapped(data) or not (balance or plan.task.own_order):
        return data
    order: Order | None = getattr(task, "order") if plan.task.own_order else None  # noqa: B009
    lengths = lengths_of(data, task, plan, world) if balance else None
    return ArrangedData(data, order, lengths, getattr(task, "micro_batch_tokens", None))


def lengths_of(data: Any, task: Task, plan: RunPlan, world: World) -> Sequence[float] | Tensor | None:
    """Return the lengths of all samples; None if ranks have other numbers of samples. All ranks call it.

    They are those of the task's ``lengths(data)``, or the column ``length`` of a Hugging Face dataset. Otherwise each
    sample is read once, by the ranks and their loader processes together, for the task's ``length(sample)``.
    """
    if (lengths := _known_lengths(data, task)) is not None:
        return lengths
    started = time.perf_counter()
    reader = _LengthReader(data, getattr(task, "length"), plan.train.seed)  # noqa: B009
    own = range(world.rank, len(data), world.size)
    parts = [own[start : start + _AT_ONCE] for start in range(0, len(own), _AT_ONCE)]
    read: list[float] = []
    for batch in prefetch(reader, plan, torch.device("cpu"), plan.train.seed, order=parts):
        read += batch.data
    with HEARTBEAT.waiting_for(Wait.collective):
        everyone = world.of_all(read)
    values = [0.0] * sum(map(len, everyone))
    if any(len(part) != len(range(rank, len(values), world.size)) for rank, part in enumerate(everyone)):
        return None  # the comparison of the data that follows names the ranks
    for rank, part in enumerate(everyone):
        values[rank :: world.size] = part
    if world.rank == 0:
        print(
            f"batch.balance=length: read {count(len(values), 'sample')} for length(sample) in "
            f"{time.perf_counter() - started:.1f} s, as at every start. A method lengths(data) would save that.",
            flush=True,
        )
    return values


def _known_lengths(data: Any, task: Task) -> Any:
    """Return the lengths of all samples if none has to be read for them."""
    lengths: Callable[[Any], Any] | None = getattr(task, "lengths", None)
    return column_of_lengths(data) if lengths is None else lengths(data)


def require_length_of_first(data: Any, task: Task, seed: int) -> None:
    """Check ``length(sample)`` of the first sample.

    Raises:
        DataError: it is no length.
    """
    checked_lengths([_LengthReader(data, getattr(task, "length"), seed)[range(1)][0][0]], 1)  # noqa: B009


class _LengthReader(Dataset[tuple[list[float], int]]):
    def __init__(self, data: Any, length: Callable[[Any], float], seed: int) -> None:
        self._data, self._length, self._random = data, length, SampleRandom(seed)

    def __getitem__(self, indices: range) -> tuple[list[float], int]:
        return [self._length_of(index) for index in indices], len(indices)

    def _length_of(self, index: int) -> float:
        with self._random.own():
            self._random.seed(0, index)
            length = self._length(self._data[index])
        try:
            return float(length)
        except (TypeError, ValueError):
            raise DataError(
                f"length(sample) returned a {type(length).__name__} for sample {index} of the training data.\n"
                "  Return a number, such as the sample's tokens."
            ) from None
