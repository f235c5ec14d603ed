"""strategy=auto and sync=auto: what is chosen from made forecasts, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Config, StrategyKind, Sync
from launcher.errors import ConfigError
from launcher.launch import planner
from launcher.plan.run_plan import Forecast, RunPlan, StrategyPlan
from launcher.plan.strategy import with_memory
from launcher.plan.strategy_choice import Candidate, choose_strategy, rank
from tests.helpers import make_plan


def forecast(sync: Sync, wire: int, peak: int | None) -> Forecast:
    return Forecast(sync=sync, payload_bytes=wire, wire_bytes=wire, peak_bytes=peak)


class Planned:
    """Stand-in for the planner that records which strategies were tried."""

    def __init__(self, peaks: dict[str, int | None], *overrides: str, memory: int | None = 1000) -> None:
        self.config = compose(["strategy=auto", *overrides])
        self.tried: list[str] = []
        self._peaks, self._overrides, self._memory = peaks, overrides, memory

    def __call__(self, config: Config) -> RunPlan:
        kind = config.strategy.kind.value
        self.tried.append(kind)
        groups = ["strategy.shard_size=2"] * (kind == "hsdp" and bool(self._peaks))
        plan = make_plan(f"strategy={kind}", *self._overrides, *groups)
        return with_peaks(plan, dict.fromkeys(Sync, self._peaks.get(kind)), self._memory)


def with_peaks(plan: RunPlan, peaks: Mapping[Sync, int | None], memory: int | None = 1000) -> RunPlan:
    """Return ``plan`` with these predicted peaks, on a device with this memory."""
    forecasts = tuple(dataclasses.replace(each, peak_bytes=peaks[each.sync]) for each in plan.strategy.forecasts)
    return dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=memory)
    )


@pytest.mark.parametrize(
    ("peaks", "workers", "memory", "tried", "chosen", "reason"),
    [
        ((100, 50, 60), 4, 1000, 1, "ddp", "the simplest one that is predicted to fit into memory"),
        ((1920, 50, 60), 4, 1000, 2, "fsdp", "the simplest .* to fit into memory; ddp lacks 1.00 kB"),
        ((1920, 1930, 60), 4, 1000, 3, "hsdp", "the simplest .*; ddp lacks .*; fsdp lacks 1.01 kB"),
        ((None, None, None), 4, 1000, 1, "ddp", "the simplest one, because the memory .* is not known"),
        ((10**12, 10**12, 10**12), 4, None, 1, "ddp", "the simplest one, because the memory .* is not known"),
        ((9000, 2000, 3000), 4, 1000, 3, "fsdp", "least memory: no strategy is predicted to fit, and fsdp lacks 1.08"),
        ((5000, 4000, 10), 2, 1000, 3, "fsdp", "least memory: "),  # two ranks are no shard groups
    ],
)
def test_the_simplest_strategy_that_fits_and_no_more_are_tried(
    peaks: Sequence[int | None], workers: int, memory: int | None, tried: int, chosen: str, reason: str
) -> None:
    kinds = ["ddp", "fsdp", "hsdp"]
    planned = Planned(dict(zip(kinds, peaks, strict=True)), f"cluster.workers_per_node={workers}", memory=memory)
    best = choose_strategy(planned.config, planned)
    assert (planned.tried, best.strategy.kind.value) == (kinds[:tried], chosen)
    assert re.match(reason, best.strategy.kind_reason), best.strategy.kind_reason
    assert RunPlan.from_json(best.to_json()) == best


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
        forecasts = with_peaks(plan, dict.fromkeys(Sync, peak)).strategy.forecasts
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
    forecasts = with_peaks(plan, PEAKS).strategy.forecasts
    chosen = [with_memory(plan.strategy, forecasts, memory).sync.value for memory in (1000, 900, 700, 600, 400)]
    assert chosen == list(by_memory)
    assert plan.strategy.sync is Sync.gather_once, "before the memory is known"


WORKERS = "cluster.workers_per_node"


def candidate(label: str, *overrides: str, peak: int | None = None, memory: int = 1000) -> Candidate:
    """Return a plan whose policy has this predicted peak."""
    return Candidate(label, with_peaks(make_plan(*overrides), dict.fromkeys(Sync, peak), memory))


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


def test_equal_reasons_are_grouped_and_notes_that_all_plans_have_are_shown_once() -> None:
    plan = candidate("a").plan
    plans = [Candidate("a", plan.with_notes(["both", "first"])), Candidate("b", plan.with_notes(["both"]))]
    ranking = rank(plans, [("b", "no"), ("c", "never"), ("d", "no")])
    assert ranking.impossible == {"no": ["b", "d"], "never": ["c"]}
    assert ranking.notes == ("both",)
