"""The grid of the equivalence suite: how windows are spread over ranks and micro-batches, and what they equal.

A run is one cell of all factors but {full, short window}: its epochs are a full window and a short one in turn, and the
gradients of the two kinds are compared apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

# steps of a run, by selection
STEPS = {"whole": 20, "covering": 4, "losses": 4, "balanced": 4, "mutated": 8}
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
    """Training job, which one process also solves as one big batch.

    Args:
        items: items of a sample: 6 (fixed), 1 to 9 (variable), 1 to 9 with the weights of their classes (weighted), or
            those of two terms, each with items of its own, possibly none (terms).
        clip: maximum norm of the gradient; None: no clip.
    """

    items: str
    optimizer: str
    clip: float | None


@dataclass(frozen=True)
class Cell:
    """Way to run ``problem`` on several ranks. ``balance``: samples are dealt out by their lengths."""

    strategy: str
    sync: str
    accumulation: int
    problem: Problem
    balance: bool = False

    def __str__(self) -> str:
        balance = ", balanced" if self.balance else ""
        clip = "clip" if self.problem.clip else "no clip"
        return (
            f"{self.strategy} {self.sync}, accumulation {self.accumulation}, {self.problem.items} items, "
            f"{self.problem.optimizer}, {clip}{balance}"
        )


PROBLEMS = tuple(itertools.starmap(Problem, itertools.product(("fixed", "variable"), ("sgd", "adamw"), (None, CLIP))))
# exact averages of other losses: all of their optimizers and clips are in the whole grid
LOSSES = tuple(itertools.starmap(Problem, itertools.product(("weighted", "terms"), ("sgd", "adamw"), (None, CLIP))))
# of LOSSES, each with another optimizer or clip than the next
FEW_LOSSES = (0, 7, 3, 4)
# each half has every pair of the three factors' values; the two differ in every three of them
HALVES = ((0, 3, 5, 6), (1, 2, 4, 7))


def whole(world: int) -> Iterator[Cell]:
    """Every cell of a world."""
    for strategy in STRATEGIES[world]:
        for sync, accumulation, problem in itertools.product(SYNCS[strategy], ACCUMULATIONS, (*PROBLEMS, *LOSSES)):
            yield Cell(strategy, sync, accumulation, problem)


def covering(world: int) -> Iterator[Cell]:
    """An eighth of those of PROBLEMS: every policy of every strategy with every accumulation, each with one problem, so
    that every two values of two factors meet (test_grid.py). And each policy with two problems of LOSSES, of which one
    accumulates."""
    groups = [(w, strategy, sync) for w in STRATEGIES for strategy in STRATEGIES[w] for sync in SYNCS[strategy]]
    for number, (of, strategy, sync) in enumerate(groups):
        for place, accumulation in enumerate(ACCUMULATIONS if of == world else ()):
            problem = PROBLEMS[HALVES[number % 2][(place + number // 2) % 4]]
            yield Cell(strategy, sync, accumulation, problem)
        for place, accumulation in enumerate((1, 3) if of == world else ()):
            yield Cell(strategy, sync, accumulation, LOSSES[FEW_LOSSES[(number + place) % 4]])


def losses(world: int) -> Iterator[Cell]:
    """Every policy of every strategy with both kinds of LOSSES, with and without accumulation."""
    for number, strategy in enumerate(STRATEGIES[world]):
        for sync, (place, accumulation), kind in itertools.product(SYNCS[strategy], enumerate((1, 3)), range(2)):
            yield Cell(strategy, sync, accumulation, LOSSES[FEW_LOSSES[(number + 2 * place + kind) % 4]])


def balanced(world: int) -> Iterator[Cell]:
    """Every policy of every strategy with samples of unequal length that are divided by their lengths."""
    for strategy in STRATEGIES[world]:
        for sync, accumulation in itertools.product(SYNCS[strategy], (1, 3)):
            yield Cell(strategy, sync, accumulation, Problem("variable", "sgd", None), balance=True)


def mutated(world: int) -> Iterator[Cell]:
    """Return the cells in which each mistake is made: all problems, with accumulation."""
    assert world == 2
    for problem in PROBLEMS:
        yield Cell("ddp", "boundary", 3, problem)


SELECTIONS = {"whole": whole, "covering": covering, "losses": losses, "balanced": balanced, "mutated": mutated}


@dataclass(frozen=True)
class Outcome:
    """Largest relative errors in a cell's run: gradients of ``full`` and ``short`` windows as they are applied, their
    norms before the clip, the last parameters. ``error``: error that ended the run."""

    cell: str
    mistake: str = ""
    full: float = 0.0
    short: float = 0.0
    norm: float = 0.0
    parameters: float = 0.0
    error: str = ""

    @property
    def failures(self) -> list[str]:
        """Return the names of errors above their bound; the suite passes if there are none."""
        bounds = {"full": GRADIENT, "short": GRADIENT, "norm": GRADIENT, "parameters": PARAMETERS}
        found = [name for name, bound in bounds.items() if not getattr(self, name) <= bound]
        return ["error", *found] if self.error else found
