"""The grid of the equivalence suite: how a window is spread over ranks and micro-batches, and what it is to be equal to.

A run is one cell of all factors but {full, short window}: its epochs are a full window and a short one in turn, and the
gradients of the two kinds are compared apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

STEPS = 20
GRADIENT, PARAMETERS = 1e-6, 1e-5  # relative, against fp64
GLOBAL_SIZE = 96  # of which each world and accumulation of the grid has its share
SHORT = 13  # samples of a short window: no world divides it
CLIP = 0.05  # below every gradient's norm

SYNCS = {
    "single": ("every",),
    "ddp": ("every", "boundary"),
    "fsdp": ("every", "boundary", "gather_once"),
    "hsdp": ("every", "boundary", "gather_once", "replicas_at_boundary"),
}
# hsdp needs several shard groups of several ranks; ddp of one rank is single
STRATEGIES = {1: ("single", "fsdp"), 2: ("ddp", "fsdp"), 4: ("ddp", "fsdp", "hsdp")}
ACCUMULATIONS = (1, 2, 3, 8)


@dataclass(frozen=True)
class Problem:
    """What is learned: the same in one process at once. ``items``: a sample has 6 of them, or 1 to 9."""

    items: str
    optimizer: str
    clip: float | None


@dataclass(frozen=True)
class Cell:
    """``problem`` on a world, spread as the rest says."""

    strategy: str
    sync: str
    accumulation: int
    problem: Problem

    def __str__(self) -> str:
        clip = "clip" if self.problem.clip else "no clip"
        return (
            f"{self.strategy} {self.sync}, accumulation {self.accumulation}, {self.problem.items} items, "
            f"{self.problem.optimizer}, {clip}"
        )


PROBLEMS = tuple(itertools.starmap(Problem, itertools.product(("fixed", "variable"), ("sgd", "adamw"), (None, CLIP))))


def cells(strategy: str) -> Iterator[Cell]:
    for sync, accumulation, problem in itertools.product(SYNCS[strategy], ACCUMULATIONS, PROBLEMS):
        yield Cell(strategy, sync, accumulation, problem)
