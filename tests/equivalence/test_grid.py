"""The engine is one big batch in fp64 wherever ranks and micro-batches are, and the suite sees the classic mistakes.

`make test` runs the covering cells, a fraction of the grid; `python -m tests.equivalence.run` runs all 1152 of them.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.equivalence.grid import (
    ACCUMULATIONS,
    LOSSES,
    PROBLEMS,
    SELECTIONS,
    STRATEGIES,
    SYNCS,
    Cell,
    balanced,
    covering,
    losses,
    mutated,
    whole,
)
from tests.equivalence.run import run


def factors(world: int, cell: Cell) -> dict[str, object]:
    problem = cell.problem
    return {
        "world": world, "policy": (cell.strategy, cell.sync), "accumulation": cell.accumulation,
        "items": problem.items, "optimizer": problem.optimizer, "clip": problem.clip,
    }  # fmt: skip


def pairs(world: int, cell: Cell) -> set[object]:
    return set(itertools.combinations(factors(world, cell).items(), 2))


def test_two_values_of_two_factors_always_meet() -> None:
    cells = [(world, cell) for world in STRATEGIES for cell in whole(world)]
    everywhere = [(world, cell) for world, cell in cells if cell.problem in PROBLEMS]
    chosen = [(world, cell) for world in STRATEGIES for cell in covering(world) if cell.problem in PROBLEMS]
    policies = sum(len(SYNCS[strategy]) for world in STRATEGIES for strategy in STRATEGIES[world])
    assert len(everywhere) == len(set(everywhere)) == policies * len(ACCUMULATIONS) * len(PROBLEMS) == 576
    assert len(cells) == len(set(cells)) == 2 * 576
    assert len(chosen) == len(set(chosen)) == 576 // 8
    assert set(chosen) <= set(everywhere)
    assert set().union(*itertools.starmap(pairs, chosen)) == set().union(*itertools.starmap(pairs, everywhere))


def test_every_policy_has_float_items_and_several_terms_and_every_sharding_both_with_and_without_accumulation() -> None:
    both = [(1, "terms"), (1, "weighted"), (3, "terms"), (3, "weighted")]
    sharded = [cell for world in STRATEGIES for cell in covering(world) if cell.strategy in ("fsdp", "hsdp")]
    for strategy in ("fsdp", "hsdp"):
        seen = {(c.accumulation, c.problem.items) for c in sharded if c.strategy == strategy and c.problem in LOSSES}
        assert sorted(seen) == both
    for world in STRATEGIES:
        for selection, expected in ((covering, (both[0::3], both[1:3])), (losses, (both,))):
            found = [cell for cell in selection(world) if cell.problem in LOSSES]
            assert len(found) == len(set(found))
            for strategy in STRATEGIES[world]:
                for sync in SYNCS[strategy]:
                    seen = [
                        (c.accumulation, c.problem.items) for c in found if (c.strategy, c.sync) == (strategy, sync)
                    ]
                    assert sorted(seen) in expected


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["covering", pytest.param("losses", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("world", list(STRATEGIES))
def test_one_big_batch(world: int, selection: str, tmp_path: Path) -> None:
    outcomes = run(world, selection, tmp_path)
    assert [outcome.cell for outcome in outcomes] == [str(cell) for cell in SELECTIONS[selection](world)]
    assert not [outcome for outcome in outcomes if outcome.failures]


# by mistake: which cells fail, and how. Each one leaves the others as they are, or it would be seen by accident.
VARIABLE, CLIPPED, ALL = (
    {str(cell) for cell in mutated(2) if holds(cell.problem)}
    for holds in (lambda p: p.items == "variable", lambda p: p.clip, lambda _: True)
)
SEEN = {
    "none": [],
    "mean_of_means": [(ALL, {"short"}), (VARIABLE, {"full"})],
    "no_division": [(ALL, {"norm"}), (ALL - CLIPPED, {"full", "short"})],
    "full_count": [(ALL, {"norm"})],
    "clip_per_micro_batch": [(CLIPPED, {"full", "short", "norm", "parameters"})],
    "schedule_per_micro_batch": [(ALL, {"parameters"})],
    "sync_never_skipped": [(ALL, {"error"})],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.nightly) for world in (1, 4))])
def test_one_big_batch_divided_by_length(world: int, tmp_path: Path) -> None:
    outcomes = run(world, "balanced", tmp_path)
    assert [outcome.cell for outcome in outcomes] == [str(cell) for cell in balanced(world)]
    assert not [outcome for outcome in outcomes if outcome.failures]


@pytest.mark.slow
def test_every_classic_mistake_is_seen(tmp_path: Path) -> None:
    outcomes = run(2, "mutated", tmp_path, *SEEN)
    for mistake, expected in SEEN.items():
        failed = {o.cell: set(o.failures) for o in outcomes if o.mistake == mistake and o.failures}
        assert set(failed) == set().union(*(cells for cells, _ in expected)), mistake
        for cells, wrong in expected:
            assert all(wrong <= failed[cell] for cell in cells), (mistake, wrong, failed)
