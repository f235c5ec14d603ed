"""Rows that a task's ``outputs`` returns: checks, exchange between ranks, and their loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from launcher.errors import TaskError
from launcher.loss import Loss, describe_result
from launcher.task import is_mapped, seed_everything, seed_for
from launcher.train.data.randomness import kept_random_state
from launcher.train.engine.engine import Engine
from launcher.train.world import World


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


def loss_of_rows(task: Any, outputs: Any) -> Loss:
    """Return the task's ``window_loss``. A scalar tensor is taken as a mean over the rows.

    Args:
        outputs: one tensor, or several, in the structure that the task's ``outputs`` returns.

    Raises:
        TaskError: it is neither.
    """
    value: Any = task.window_loss(outputs)
    if isinstance(value, Loss):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        rows = len(tree_leaves(outputs)[0])
        return Loss(total=value.reshape(()) * rows, items=rows)
    raise TaskError(
        f"window_loss() returned {describe_result(value)}.\n"
        "  Return launcher.Loss(total=sum over items, items=how many), or a scalar tensor: the mean over the window's "
        "samples. Several terms can be added here; log their parts as Loss(metrics=...)."
    )


class HeldOutRows:
    """Loss of held-out data for a task with ``window_loss``: of consecutive groups of ``batch.global_size`` samples, in
    the order of the data set. It depends neither on the number of ranks nor on the size of micro-batches. All ranks
    call the methods; rank 0 counts the samples.

    Args:
        data: the data set, which decides how the ranks' samples alternate.
    """

    def __init__(self, task: Any, engine: Engine, data: Any) -> None:
        self._task, self._engine, self._size = task, engine, engine.plan.batch.global_size
        self._alternates = is_mapped(data)
        self._first: Rows | None = None
        self._tensors: list[Tensor] = []
        self._groups = 0

    def add(self, module: nn.Module, batch: Any, samples: int) -> Iterator[tuple[list[Loss], int]]:
        """Add a micro-batch of each rank, and yield the loss and the number of samples of each group that is complete.

        Args:
            samples: of the micro-batch; 0 of a stand-in.
        """
        engine, rows = self._engine, Rows.of(self._task.outputs(module, batch), samples or None)
        if self._first is None:
            self._first = rows
            rows.require_same(engine.world)
            self._tensors = [tensor.detach()[:0] for tensor in rows.tensors]
        rows.require_like(self._first.form)
        of_ranks = gathered(joined([rows], [samples]), engine.world, engine.device)
        numbers = [len(tensors[0]) for tensors in of_ranks]
        order = torch.arange(sum(numbers), device=engine.device)
        if self._alternates:  # sample i is in the share of rank i % world_size
            places = torch.cat([torch.arange(number, device=engine.device) for number in numbers])
            order = places.argsort(stable=True)
        added = (torch.cat(each)[order] for each in zip(*of_ranks, strict=True))
        self._tensors = [torch.cat(pair) for pair in zip(self._tensors, added, strict=True)]
        while len(self._tensors[0]) >= self._size:
            yield self._take(self._size)

    def rest(self) -> Iterator[tuple[list[Loss], int]]:
        """Yield the loss of the last group, if it is not complete."""
        if self._tensors and len(self._tensors[0]):
            with self._engine.precision.autocast():
                yield self._take(len(self._tensors[0]))

    def _take(self, count: int) -> tuple[list[Loss], int]:
        assert self._first is not None
        group = self._first.restored([tensor[:count] for tensor in self._tensors])
        self._tensors = [tensor[count:] for tensor in self._tensors]
        self._groups += 1
        with same_random_numbers(self._engine.plan.train.seed, f"held-out group {self._groups}", self._engine.device):
            loss = loss_of_rows(self._task, group)
        return [loss], count if self._engine.world.rank == 0 else 0
