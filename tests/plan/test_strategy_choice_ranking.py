"""Ranking of plans: what fits, then wire bytes, then simplicity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from launcher.errors import ConfigError
from launcher.plan.strategy_choice import Candidate, rank, require_equal_work
from tests.helpers import make_plan

WORKERS = "cluster.workers_per_node"


def candidate(label: str, *overrides: str, peak: int | None = None, memory: int = 1000) -> Candidate:
    """Return a plan whose policy has this predicted peak."""
    plan = make_plan(*overrides)
    forecasts = tuple(dataclasses.replace(each, peak_bytes=peak) for each in plan.strategy.forecasts)
    strategy = dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=memory)
    return Candidate(label, dataclasses.replace(plan, strategy=strategy))


def labels(candidates: Sequence[Candidate]) -> list[str]:
    return [each.label for each in candidates]


def test_fewer_bytes_are_better_and_of_equal_bytes_the_simpler() -> None:
    four = (f"{WORKERS}=4", "precision=fp32")
    cells = [
        candidate("every", *four, "strategy.sync=every", "batch.accumulation=4"),
        candidate("once", *four, "strategy=fsdp", "batch.accumulation=4", "strategy.sync=gather_once"),
        candidate("boundary", *four, "batch.accumulation=4"),
        candidate("larger", *four, "batch.accumulation=2"),
        candidate("unknown", *four, "strategy.compress=powersgd"),
        candidate("alone", f"{WORKERS}=1"),
    ]
    assert labels(rank(cells).fitting) == ["alone", "larger", "boundary", "once", "every", "unknown"]
    assert labels(rank(cells[::-1]).fitting) == labels(rank(cells).fitting)


def test_what_does_not_fit_is_named_with_its_excess_and_not_ranked() -> None:
    fits = candidate("fits", peak=920)
    large, larger = candidate("large", peak=921), candidate("larger", peak=2000)
    ranking = rank([larger, fits, large, candidate("unknown", "batch.accumulation=2", peak=None)])
    assert set(labels(ranking.fitting)) == {"fits", "unknown"}
    assert [(each.label, each.missing_bytes) for each in ranking.too_large] == [("large", 1), ("larger", 1080)]


def test_equal_reasons_are_grouped() -> None:
    ranking = rank([candidate("a")], [("b", "no"), ("c", "never"), ("d", "no")])
    assert ranking.impossible == {"no": ["b", "d"], "never": ["c"]}


def test_cells_that_do_not_do_the_same_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch.global_size=64, 128: differs .*\n.*batch.micro_size"):
        require_equal_work([64, 128])


def test_notes_that_all_plans_have_are_shown_once() -> None:
    common, own = candidate("a"), candidate("b")
    plans = [common.plan.with_notes(["both", "first"]), own.plan.with_notes(["both"])]
    assert rank([Candidate(str(n), plan) for n, plan in enumerate(plans)]).notes == ("both",)
