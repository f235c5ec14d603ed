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
from launcher.plan.strategy_choice import best_strategy, choose_strategy
from tests.helpers import make_plan
from tests.plan.test_ranking import step_time

KINDS = (StrategyKind.ddp, StrategyKind.fsdp, StrategyKind.hsdp)


def forecast(sync: Sync, wire: int, peak: int | None, step_s: float | None = None, error: float = 0.0) -> Forecast:
    step = None if step_s is None else step_time(step_s, error)
    return Forecast(sync=sync, payload_bytes=wire, wire_bytes=wire, wire_s=None, peak_bytes=peak, step=step)


def plan_of(kind: str, peak: int | None, step_s: float | None, error: float, memory: int | None = 1000) -> RunPlan:
    plan = make_plan(f"strategy={kind}", "cluster.workers_per_node=4", *(["strategy.shard_size=2"] * (kind == "hsdp")))
    step = None if step_s is None else step_time(step_s, error)
    forecasts = tuple(dataclasses.replace(each, peak_bytes=peak, step=step) for each in plan.strategy.forecasts)
    return dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=memory)
    )


@pytest.mark.parametrize(
    ("peaks", "times", "error", "chosen", "reason"),
    [
        ((100, 50, 60), (None, None, None), 0, "ddp", "the simplest one that is predicted to fit into memory"),
        ((1920, 50, 60), (None, None, None), 0, "fsdp", "the simplest .* to fit into memory; ddp lacks 1.00 kB"),
        ((None, None, None), (None, None, None), 0, "ddp", "the simplest one, because the memory .* is not known"),
        (
            (9000, 2000, 3000),
            (1, 2, 3),
            0,
            "fsdp",
            "least memory: no strategy is predicted to fit, and fsdp lacks 1.08 kB",
        ),
        ((100, 50, 60), (3, 1, 2), 0.1, "fsdp", "fastest predicted step, 1 s; hsdp 2 s, ddp 3 s"),
        ((100, 50, 60), (1.1, 3, 1), 0.1, "ddp", r"the simplest of ddp \(1.1 s\) and hsdp .* cannot be told apart"),
        ((9000, 50, 60), (0.1, 2, 1), 0.1, "hsdp", "fastest predicted step, 1 s; fsdp 2 s; ddp lacks 8.08 kB"),
        ((100, 50, 60), (None, 1, 2), 0, "ddp", "the simplest one that is predicted to fit into memory"),
        (
            (9000, 50, 3000),
            (1, 2, 3),
            0,
            "fsdp",
            "the only one that .* to fit into memory; ddp lacks .*; hsdp lacks .*",
        ),
    ],
)
def test_the_best_strategy(
    peaks: Sequence[int | None], times: Sequence[float | None], error: float, chosen: str, reason: str
) -> None:
    rows = zip(KINDS, peaks, times, strict=True)
    plans = [plan_of(kind.value, peak, step_s, error) for kind, peak, step_s in rows]
    best = best_strategy(plans)
    assert best.strategy.kind.value == chosen
    assert re.fullmatch(reason + ".*", best.strategy.kind_reason), best.strategy.kind_reason
    assert RunPlan.from_json(best.to_json()) == best


def test_without_memory_of_the_device_the_simplest_is_taken() -> None:
    plans = [plan_of(kind.value, 10**12, None, 0, memory=None) for kind in KINDS]
    assert best_strategy(plans).strategy.kind is StrategyKind.ddp


class Planned:
    """Stand-in for the planner that records which strategies were tried."""

    def __init__(self, peaks: dict[str, int], *overrides: str, times: dict[str, float] | None = None) -> None:
        self.config = compose(["strategy=auto", *overrides])
        self.tried: list[str] = []
        self._peaks, self._overrides, self._times = peaks, overrides, times or {}

    def __call__(self, config: Config) -> RunPlan:
        kind = config.strategy.kind.value
        self.tried.append(kind)
        plan = make_plan(f"strategy={kind}", *self._overrides)
        step = step_time(self._times[kind]) if kind in self._times else None
        forecasts = tuple(
            dataclasses.replace(each, peak_bytes=self._peaks.get(kind), step=step) for each in plan.strategy.forecasts
        )
        return dataclasses.replace(
            plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=1000)
        )


@pytest.mark.parametrize(
    ("peaks", "timed", "tried"),
    [
        ({"ddp": 10}, False, ["ddp"]),
        ({"ddp": 10}, True, ["ddp", "fsdp", "hsdp"]),
        ({"ddp": 5000, "fsdp": 10}, False, ["ddp", "fsdp"]),
        ({"ddp": 5000, "fsdp": 4000, "hsdp": 4500}, False, ["ddp", "fsdp", "hsdp"]),
    ],
)
def test_no_more_strategies_are_tried_than_the_choice_needs(
    peaks: dict[str, int], timed: bool, tried: list[str]
) -> None:
    planned = Planned(peaks, "cluster.workers_per_node=2")  # which cannot be split into shard groups
    plan = choose_strategy(planned.config, planned, timed=timed)
    assert planned.tried == tried
    assert plan.strategy.kind.value == min(
        peaks, key=lambda kind: (peaks[kind] > 920, peaks[kind] * (peaks[kind] > 920))
    )


@pytest.mark.parametrize(
    ("times", "chosen", "reason"),
    [
        ({"ddp": 2.0, "fsdp": 1.0}, "fsdp", "fastest predicted step, 1 s; ddp 2 s"),
        ({"ddp": 2.0}, "ddp", "the simplest one that is predicted to fit into memory"),
    ],
)
def test_a_start_compares_the_times_that_an_earlier_plan_has_left(
    times: dict[str, float], chosen: str, reason: str
) -> None:
    planned = Planned({"ddp": 10, "fsdp": 10}, "cluster.workers_per_node=2", times=times)
    plan = choose_strategy(planned.config, planned, timed=False)
    assert (plan.strategy.kind.value, plan.strategy.kind_reason) == (chosen, reason)


def test_the_only_possible_strategy_is_not_called_the_fastest() -> None:
    plan = best_strategy([plan_of("hsdp", 10, 1.0, 0)])
    assert plan.strategy.kind_reason == "the only one that is possible"


def test_one_rank_is_single() -> None:
    planned = Planned({}, "cluster.workers_per_node=1")
    plan = choose_strategy(planned.config, planned, timed=True)
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
        choose_strategy(planned.config, planned, timed=True)


def test_an_option_of_a_strategy_chooses_among_those_that_have_it() -> None:
    planned = Planned({}, "strategy.shard_size=2", "cluster.workers_per_node=4")
    assert choose_strategy(planned.config, planned, timed=True).strategy.kind is StrategyKind.hsdp


@pytest.mark.parametrize(("workers", "kind"), [(1, StrategyKind.single), (2, StrategyKind.ddp)])
def test_a_loop_of_the_users_own_has_the_simplest_strategy(workers: int, kind: StrategyKind) -> None:
    """There nothing is known of the model; and all ranks must decide alike."""
    plan = make_plan("strategy=auto", f"cluster.workers_per_node={workers}")
    assert plan.strategy.kind is kind
    assert plan.strategy.kind_reason


def test_the_planner_weighs_the_memory_of_a_strategy_that_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[StrategyKind] = []

    def weigh(plan: RunPlan, **_: Any) -> RunPlan:
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
        (((30, 1, None), (20, 2, None), (10, 3, None)), "gather_once", "fewest wire bytes"),
        (((30, 1, None), (20, 2, None), (10, 2000, None)), "boundary", "fewest wire bytes of the policies that fit"),
        (((30, 3000, 3.0), (20, 2000, 2.0), (9, 4000, 1.0)), "boundary", "least memory: no policy is predicted to fit"),
        (((30, 1, 1.0), (20, 2, 3.0), (10, 3, 4.0)), "every", "fastest predicted step, 1 s; boundary takes 3 s"),
        (
            ((30, 2000, 1.0), (20, 2, 3.0), (10, 3, 4.0)), "boundary",
            "fastest predicted step of the policies that fit, 3 s; gather_once takes 4 s",
        ),
        (
            ((30, 1, 5.0), (20, 2, 1.0), (10, 3, 1.1)), "gather_once",
            "fewest wire bytes of boundary and gather_once, whose predicted times cannot be told apart",
        ),
        (((30, 1, 1.0), (20, 2, None), (10, 3, 2.0)), "gather_once", "fewest wire bytes"),
    ],
)  # fmt: skip
def test_the_best_sync_policy(forecasts: Sequence[tuple[int, int, float | None]], chosen: str, reason: str) -> None:
    policies = (Sync.every, Sync.boundary, Sync.gather_once)
    made = [forecast(sync, *each, 0.1) for sync, each in zip(policies, forecasts, strict=True)]
    plan: StrategyPlan = make_plan("strategy=fsdp").strategy
    best = with_memory(plan, made, 1000)
    assert (best.sync.value, best.sync_reason) == (chosen, reason)
    assert best.rehearses is all(peak <= 920 for _, peak, _ in forecasts)
