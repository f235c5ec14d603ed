"""Strategy solver: the policy that is chosen, and the bytes that are predicted for it."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config.schema import Device, StrategyKind, Sync
from launcher.plan.run_plan import Forecast, StrategyPlan, TaskPlan, predicted_metrics
from launcher.plan.strategy import excess_notes, least_note, with_memory
from launcher.plan.sync_policy import POLICIES
from tests.helpers import make_plan

CLUSTER = make_plan().cluster


def own(strategy: StrategyPlan) -> Forecast:
    assert strategy.forecast is not None
    return strategy.forecast


def test_predicted_bytes_of_each_policy() -> None:
    """1000 parameters, 800 in units, gathered as bf16, summed as fp32; 2 shards x 2 replicas, 4 micro-batches."""
    solved = make_plan(
        "strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2", "batch.micro_size=4",
        "batch.accumulation=4", "precision=bf16",
    ).strategy  # fmt: skip
    gather, scatter, reduce = 2 * 800 * 2 + 2 * 200, 4000, 2000
    expected = {
        Sync.every: 4 * (gather + scatter + reduce),
        Sync.boundary: 4 * gather + scatter + reduce,
        Sync.gather_once: 2000 + scatter + reduce,
        Sync.replicas_at_boundary: 4 * (gather + scatter) + reduce,
    }
    assert {forecast.sync: forecast.payload_bytes for forecast in solved.forecasts} == expected
    assert [forecast.sync for forecast in solved.forecasts] == list(POLICIES[StrategyKind.hsdp])
    # half of what is gathered and scattered by two, and all of what two reduce
    assert own(solved).wire_bytes == (2000 + scatter) // 2 + reduce


def test_a_bound_in_tokens_is_predicted_with_several_micro_batches() -> None:
    """Their number follows from the lengths, so the record predicts only bytes that do not depend on it."""
    options = (
        "strategy=fsdp", "cluster.workers_per_node=2", "batch.global_size=128", "batch.micro_size=64",
        "batch.balance=length",
    )  # fmt: skip
    whole, bounded = (make_plan(*options, *more) for more in ((), ("batch.micro_tokens=16K",)))
    assert len({forecast.payload_bytes for forecast in whole.strategy.forecasts}) < 3
    assert len({forecast.payload_bytes for forecast in bounded.strategy.forecasts}) == 3
    assert [note for note in bounded.notes if "are predicted for 2 a rank" in note]
    assert [note for note in bounded.notes if "Evaluation runs 64 samples at once" in note]
    assert predicted_metrics(whole) == predicted_metrics(bounded) == {"predicted/wire_bytes": 4000}
    assert not predicted_metrics(make_plan(*options, "batch.micro_tokens=16K", "strategy.sync=every"))


@pytest.mark.parametrize(
    ("width", "narrow", "formats", "gathered"),
    [
        (4, 0, "fp32", 2 * 750 + 4 * 250),  # only matrix products are gathered narrow
        (2, 1000, "keep", 2 * 1000),
        (2, 1000, "fp32", 2 * 750 + 4 * 250),
        (8, 0, "keep", 8 * 1000),
        (8, 0, "fp32", 8 * 1000),  # fp64 is never converted
    ],
)
def test_parameters_are_predicted_to_be_gathered_in_their_own_format(
    width: int, narrow: int, formats: str, gathered: int
) -> None:
    """Gradients are summed in fp32 in any case."""
    task = TaskPlan(
        target="some.Task", params={}, samples=1000, parameters=1000, gradient_bytes=width * 1000, unit_parameters=800,
        matmul_parameters=750, unit_matmul_parameters=700, narrow_parameters=narrow,
    )  # fmt: skip
    plan = make_plan(
        "strategy=fsdp", "strategy.sync=gather_once", "precision=bf16", f"precision.parameters={formats}", task=task
    )
    assert own(plan.strategy).payload_bytes == gathered + 4000


def test_auto_sync_keeps_away_from_what_is_not_safe() -> None:
    solved = make_plan("strategy.find_unused_parameters=true").strategy
    assert solved.sync is Sync.every
    assert "find_unused_parameters" in solved.sync_reason


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["strategy=ddp"], "16.00 kB for parameters, gradients and the state of AdamW"),
        (["strategy=fsdp"], "8.00 kB"),  # over two ranks
        (["strategy=ddp", "optimizer=sgd"], "8.00 kB for parameters and gradients"),
        (["strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2"], "8.00 kB"),
        (["optimizer.groups=[{match: w, _target_: torch.optim.SGD, lr: 0.1}]"], "8.00 kB for parameters and gradients"),
        (["strategy=ddp", "precision.parameters=keep"], "12.80 kB"),  # 400 of the 1,000 in bf16
        (["strategy=ddp", "optimizer=muon"], "12.00 kB for parameters, gradients and the state of AdamW and Muon"),
    ],
)
def test_the_share_of_a_rank(overrides: list[str], needed: str) -> None:
    plan = make_plan(*overrides)
    task = dataclasses.replace(plan.task, gradient_bytes=3200, narrow_parameters=400)
    plan = dataclasses.replace(plan, task=task)
    assert f"A rank needs at least {needed}" in least_note(plan, None)
    if "optimizer=muon" in overrides:  # 100 in no group, 200 and 300 in AdamW's groups, 400 in Muon's
        plan = dataclasses.replace(plan, task=dataclasses.replace(task, group_parameters=(100, 200, 300, 400)))
        assert "14.40 kB for parameters, gradients and the state of AdamW and Muon" in least_note(plan, None)


def test_what_a_rank_has_is_named_if_it_is_less() -> None:
    plan = make_plan("strategy=ddp")
    assert least_note(plan, 10_000).endswith("; it has 10.00 kB.")
    assert "it has" not in least_note(plan, 16_000)
    unknown = dataclasses.replace(plan, task=dataclasses.replace(plan.task, parameters=None, gradient_bytes=None))
    assert not least_note(unknown, 1)


def test_without_a_peak_least_bytes_decide_and_the_later_policy_wins_ties() -> None:
    def known(sync: Sync, wire: int, least: int | None) -> Forecast:
        return Forecast(sync=sync, payload_bytes=wire, wire_bytes=wire, peak_bytes=None, least_bytes=least)

    strategy = make_plan("strategy=fsdp").strategy
    unknown = [known(Sync.every, 9, None), known(Sync.boundary, 9, None)]
    assert with_memory(strategy, unknown, 100).sync is Sync.boundary
    too_large = [known(Sync.every, 9, 500), known(Sync.boundary, 5, 700), known(Sync.gather_once, 1, 900)]
    assert with_memory(strategy, too_large, 100).sync is Sync.every, "least memory"
    assert with_memory(strategy, [known(Sync.every, 9, 20), known(Sync.boundary, 9, 70)], 100).sync is Sync.every


def test_a_plan_whose_least_memory_exceeds_the_gpu_has_a_note() -> None:
    plan = make_plan("strategy=fsdp")
    forecast = Forecast(
        sync=plan.strategy.sync, payload_bytes=1, wire_bytes=1, peak_bytes=None, least_bytes=2 * 10**9
    )  # fmt: skip
    plan = dataclasses.replace(
        plan,
        cluster=dataclasses.replace(plan.cluster, device=Device.cuda),
        strategy=dataclasses.replace(plan.strategy, memory_bytes=10**9, forecasts=(forecast,)),
    )
    (note,) = excess_notes(plan)
    assert "tensors need at least 2" in note
    assert "it does not fit" in note
