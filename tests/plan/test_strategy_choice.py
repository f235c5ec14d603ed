"""strategy=auto and sync=auto: what is chosen from made forecasts, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Config, StrategyKind, Sync
from launcher.errors import ConfigError
from launcher.launch import planner
from launcher.plan.run_plan import Forecast, RunPlan, StrategyPlan
from launcher.plan.strategy import with_memory
from launcher.plan.strategy_choice import Candidate, best_strategy, choose_strategy, rank, require_equal_work
from tests.helpers import make_plan

KINDS = (StrategyKind.ddp, StrategyKind.fsdp, StrategyKind.hsdp)


def forecast(sync: Sync, wire: int, peak: int | None) -> Forecast:
    return Forecast(sync=sync, payload_bytes=wire, wire_bytes=wire, peak_bytes=peak)


def plan_of(kind: str, peak: int | None, memory: int | None = 1000) -> RunPlan:
    plan = make_plan(f"strategy={kind}", "cluster.workers_per_node=4", *(["strategy.shard_size=2"] * (kind == "hsdp")))
    forecasts = tuple(dataclasses.replace(each, peak_bytes=peak) for each in plan.strategy.forecasts)
    return dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=memory)
    )


@pytest.mark.parametrize(
    ("peaks", "chosen", "reason"),
    [
        ((100, 50, 60), "ddp", "the simplest one that is predicted to fit into memory"),
        ((1920, 50, 60), "fsdp", "the simplest .* to fit into memory; ddp lacks 1.00 kB"),
        ((1920, 1930, 60), "hsdp", "the simplest .* to fit into memory; ddp lacks .*; fsdp lacks 1.01 kB"),
        ((None, None, None), "ddp", "the simplest one, because the memory .* is not known"),
        ((9000, 2000, 3000), "fsdp", "least memory: no strategy is predicted to fit, and fsdp lacks 1.08 kB"),
    ],
)
def test_the_best_strategy(peaks: Sequence[int | None], chosen: str, reason: str) -> None:
    plans = [plan_of(kind.value, peak) for kind, peak in zip(KINDS, peaks, strict=True)]
    best = best_strategy(plans)
    assert best.strategy.kind.value == chosen
    assert re.fullmatch(reason + ".*", best.strategy.kind_reason), best.strategy.kind_reason
    assert RunPlan.from_json(best.to_json()) == best


def test_without_memory_of_the_device_the_simplest_is_taken() -> None:
    plans = [plan_of(kind.value, 10**12, memory=None) for kind in KINDS]
    assert best_strategy(plans).strategy.kind is StrategyKind.ddp


class Planned:
    """Stand-in for the planner that records which strategies were tried."""

    def __init__(self, peaks: dict[str, int], *overrides: str) -> None:
        self.config = compose(["strategy=auto", *overrides])
        self.tried: list[str] = []
        self._peaks, self._overrides = peaks, overrides

    def __call__(self, config: Config) -> RunPlan:
        kind = config.strategy.kind.value
        self.tried.append(kind)
        plan = make_plan(f"strategy={kind}", *self._overrides)
        forecasts = tuple(
            dataclasses.replace(each, peak_bytes=self._peaks.get(kind)) for each in plan.strategy.forecasts
        )
        return dataclasses.replace(
            plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=1000)
        )


@pytest.mark.parametrize(
    ("peaks", "tried"),
    [
        ({"ddp": 10}, ["ddp"]),
        ({"ddp": 5000, "fsdp": 10}, ["ddp", "fsdp"]),
        ({"ddp": 5000, "fsdp": 4000, "hsdp": 4500}, ["ddp", "fsdp", "hsdp"]),
    ],
)
def test_no_more_strategies_are_tried_than_the_choice_needs(peaks: dict[str, int], tried: list[str]) -> None:
    planned = Planned(peaks, "cluster.workers_per_node=2")  # which cannot be split into shard groups
    plan = choose_strategy(planned.config, planned)
    assert planned.tried == tried
    assert plan.strategy.kind.value == min(
        peaks, key=lambda kind: (peaks[kind] > 920, peaks[kind] * (peaks[kind] > 920))
    )


def test_one_rank_is_single() -> None:
    planned = Planned({}, "cluster.workers_per_node=1")
    plan = choose_strategy(planned.config, planned)
    assert (plan.strategy.kind, plan.strategy.kind_reason) == (StrategyKind.single, "the job has one rank")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("strategy.shard_size=3", "cluster.workers_per_node=4"), "strategy.shard_size=3: does not split the 4 ranks"),
        (("batch.global_size=5", "cluster.workers_per_node=2"), "5 samples cannot be shared by 2 ranks"),
    ],
)
def test_the_message_is_of_the_strategy_that_has_the_option(overrides: Sequence[str], message: str) -> None:
    planned = Planned({}, *overrides)
    with pytest.raises(ConfigError, match=message):
        choose_strategy(planned.config, planned)


def test_an_option_of_a_strategy_chooses_among_those_that_have_it() -> None:
    planned = Planned({}, "strategy.shard_size=2", "cluster.workers_per_node=4")
    assert choose_strategy(planned.config, planned).strategy.kind is StrategyKind.hsdp


@pytest.mark.parametrize(("workers", "kind"), [(1, StrategyKind.single), (2, StrategyKind.ddp)])
def test_a_loop_of_the_users_own_has_the_simplest_strategy(workers: int, kind: StrategyKind) -> None:
    """There nothing is known of the model; and all ranks must decide alike."""
    plan = make_plan("strategy=auto", f"cluster.workers_per_node={workers}")
    assert plan.strategy.kind is kind
    assert plan.strategy.kind_reason


def test_the_planner_weighs_the_memory_of_a_strategy_that_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[StrategyKind] = []

    def weigh(plan: RunPlan, *_: object, **__: Any) -> RunPlan:
        weighed.append(plan.strategy.kind)
        peak = {StrategyKind.ddp: 5000, StrategyKind.fsdp: 10}[plan.strategy.kind]
        forecasts = [dataclasses.replace(each, peak_bytes=peak) for each in plan.strategy.forecasts]
        return dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, 1000))

    monkeypatch.setattr(planner, "weigh_memory", weigh)
    plan = planner.plan_job(compose(["strategy=auto"]))
    assert weighed == [StrategyKind.ddp, StrategyKind.fsdp]
    assert plan.strategy.kind is StrategyKind.fsdp
    assert plan.strategy.kind_reason.startswith("the simplest one that is predicted to fit")


@pytest.mark.parametrize(
    ("forecasts", "chosen", "reason"),
    [
        (((30, 1), (20, 2), (10, 3)), "gather_once", "fewest wire bytes"),
        (((30, 1), (20, 2), (10, 2000)), "boundary", "fewest wire bytes of the policies that fit"),
        (((30, 2), (20, 1), (20, 2)), "boundary", "fewest wire bytes"),
        (((30, 3000), (20, 2000), (9, 4000)), "boundary", "least memory: no policy is predicted to fit"),
    ],
)
def test_the_best_sync_policy(forecasts: Sequence[tuple[int, int]], chosen: str, reason: str) -> None:
    policies = (Sync.every, Sync.boundary, Sync.gather_once)
    made = [forecast(sync, *each) for sync, each in zip(policies, forecasts, strict=True)]
    plan: StrategyPlan = make_plan("strategy=fsdp").strategy
    best = with_memory(plan, made, 1000)
    assert (best.sync.value, best.sync_reason) == (chosen, reason)
    assert best.rehearses is all(peak <= 920 for _, peak in forecasts)


PEAKS = {Sync.every: 500, Sync.boundary: 700, Sync.replicas_at_boundary: 600, Sync.gather_once: 900}


@pytest.mark.parametrize(
    ("kind", "accumulation", "by_memory"),
    [
        ("fsdp", 1, ("gather_once", "every", "every", "every", "every")),
        ("fsdp", 2, ("gather_once", "boundary", "every", "every", "every")),
        ("fsdp", 8, ("gather_once", "boundary", "every", "every", "every")),
        ("hsdp", 1, ("gather_once", "every", "every", "every", "every")),
        ("hsdp", 2, ("gather_once", "boundary", "replicas_at_boundary", "every", "every")),
        ("hsdp", 8, ("gather_once", "boundary", "replicas_at_boundary", "every", "every")),
    ],
)
def test_the_policy_of_a_job_by_the_memory_of_its_device(
    kind: str, accumulation: int, by_memory: Sequence[str]
) -> None:
    """Bytes from the policy table; 92% of the memory may be used, and with the last figure nothing fits."""
    own = ["strategy.shard_size=2"] * (kind == "hsdp")
    plan = make_plan(f"strategy={kind}", "cluster.workers_per_node=4", f"batch.accumulation={accumulation}", *own)
    forecasts = [dataclasses.replace(each, peak_bytes=PEAKS[each.sync]) for each in plan.strategy.forecasts]
    chosen = [with_memory(plan.strategy, forecasts, memory).sync.value for memory in (1000, 900, 700, 600, 400)]
    assert chosen == list(by_memory)
    assert plan.strategy.sync is Sync.gather_once, "before the memory is known"


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
