"""Rows that a task's ``outputs`` returns for samples: put together over micro-batches, and gathered from all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from launcher.errors import TaskError
from launcher.task import seed_everything, seed_for
from launcher.train.data.randomness import random_state, restore_random_state
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
            part.copy_(tensor.contiguous().reshape(own, -1).view(torch.uint8))
    received = [torch.empty_like(sent) for _ in range(world.size)]
    dist.all_gather(received, sent)
    return [
        [
            part.contiguous().view(tensor.dtype).reshape(number, *tensor.shape[1:])
            for tensor, part in zip(tensors, rows[:number].split(sizes, 1), strict=True)
        ]
        for rows, number in zip(received, numbers, strict=True)
    ]


@contextmanager
def same_random_numbers(seed: int, part: str, device: torch.device) -> Iterator[None]:
    """Return a context in which ``window_loss`` draws the same random numbers on all ranks; the state of the generators
    is restored.

    Args:
        part: the rows that it is called with.
    """
    state = random_state(device)
    seed_everything(seed_for(seed, f"window_loss of {part}"))
    yield
    restore_random_state(state, device)
