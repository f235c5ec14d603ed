"""Advice of a plan for a job that does not fit: only settings that help it, and enough of them."""

from __future__ import annotations

import dataclasses
import re

import pytest

from launcher.config.schema import Recompute, StrategyKind, Sync
from launcher.plan.memory_limit import excess_bytes
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.train.inspection import remedies
from launcher.train.inspection.remedies import find_remedy, fits
from tests.conftest import Launch
from tests.helpers import make_plan


def forecast(plan: RunPlan) -> Forecast:
    """Memory of an imagined model: 64 of state, and 8 for each sample, of which recomputation leaves 2."""
    sharded = plan.strategy.kind is not StrategyKind.ddp
    held = 0 if plan.strategy.sync is Sync.every else 30
    state = (64 + held * sharded) / (plan.strategy.shard_size if sharded else 1)
    sample = 8 if plan.strategy.recompute is Recompute.none else 2
    needed = round(state + sample * plan.batch.micro_size)
    return Forecast(
        sync=plan.strategy.sync, payload_bytes=0, wire_bytes=0, wire_s=None, peak_bytes=needed, reserved_bytes=needed
    )


def advice(memory: int, *overrides: str) -> list[str] | None:
    plan = make_plan("cluster.gpu=h100", "cluster.workers_per_node=8", "batch.global_size=128", *overrides)
    own = [forecast(plan)]
    return None if fits(plan, memory, own) else find_remedy(plan, memory, own, forecast)


@pytest.mark.parametrize(
    ("memory", "overrides", "expected"),
    [
        (192, ["batch.micro_size=16"], None),  # it fits
        (191, ["batch.micro_size=16"], ["batch.micro_size=8 batch.accumulation=2"]),  # the largest that fits
        (96, ["batch.micro_size=16"], ["batch.micro_size=4 batch.accumulation=4"]),
        (72, ["batch.micro_size=16"], ["batch.micro_size=1 batch.accumulation=16"]),
        (71, ["batch.micro_size=4"], ["strategy=fsdp"]),  # 8 + 32
        (71, ["batch.micro_size=1"], ["strategy.recompute=blocks"]),  # no smaller micro-batch
        (65, ["batch.micro_size=1"], ["strategy=fsdp"]),
        (67, ["batch.micro_size=16"], ["batch.micro_size=1 batch.accumulation=16", "strategy.recompute=blocks"]),
        (20, ["batch.micro_size=16"], ["batch.micro_size=1 batch.accumulation=16", "strategy=fsdp"]),
        (
            10, ["batch.micro_size=16"],
            ["batch.micro_size=1 batch.accumulation=16", "strategy.recompute=blocks", "strategy=fsdp"],
        ),
        (9, ["batch.micro_size=16"], []),
        (10, ["batch.micro_size=16", "strategy.recompute=blocks"],
            ["batch.micro_size=1 batch.accumulation=16", "strategy=fsdp"]),
        (10, ["batch.micro_size=1", "strategy=fsdp", "strategy.sync=every"], ["strategy.recompute=blocks"]),
        (10, ["batch.micro_size=1", "strategy=fsdp", "strategy.sync=boundary"],
            ["strategy.recompute=blocks", "strategy.sync=every"]),
        (9, ["batch.micro_size=1", "strategy=fsdp"], []),
        (39, ["batch.micro_size=1", "strategy=hsdp", "strategy.shard_size=2"], ["strategy.recompute=blocks"]),
        (32, ["batch.micro_size=1", "strategy=hsdp", "strategy.shard_size=2"],
            ["strategy=fsdp strategy.shard_size=null"]),
        (71, ["batch.micro_size=1", "strategy.static_graph=true", "strategy.recompute=blocks"], None),
        (65, ["batch.micro_size=1", "strategy.static_graph=true", "strategy.recompute=blocks"], []),
    ],
)  # fmt: skip
def test_the_fewest_settings_that_suffice(memory: int, overrides: list[str], expected: list[str] | None) -> None:
    assert advice(memory, *overrides) == expected


def test_a_policy_that_the_launcher_chooses_is_not_advised() -> None:
    plan = make_plan("cluster.gpu=h100", "cluster.workers_per_node=8", "strategy=fsdp", "batch.micro_size=1")
    own = [dataclasses.replace(forecast(plan), sync=sync, reserved_bytes=size) for sync, size in
           ((Sync.every, 16), (Sync.boundary, 20))]  # fmt: skip
    assert fits(plan, 17, own), "one of its policies"
    assert not fits(plan, 15, own)
    assert find_remedy(plan, 10, own, forecast) == ["strategy.recompute=blocks"]


def test_a_search_that_takes_too_long_advises_what_is_known_to_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "LIMIT_S", -1.0)
    every = ["batch.micro_size=1 batch.accumulation=16", "strategy.recompute=blocks", "strategy=fsdp"]
    assert advice(67, "batch.micro_size=16") == every
    assert advice(9, "batch.micro_size=16") == []


def test_a_model_without_blocks_has_nothing_to_recompute() -> None:
    plan = make_plan("cluster.gpu=h100", "cluster.workers_per_node=8", "batch.micro_size=1")
    plan = dataclasses.replace(plan, task=dataclasses.replace(plan.task, unit_parameters=0))
    assert find_remedy(plan, 66, [forecast(plan)], forecast) == ["strategy=fsdp"]


JOBS = {
    "micro": "task.width=512 task.depth=2 task.heads=8 batch.micro_size=512 strategy=ddp cluster.gpu=t4",
    "fsdp": "task.width=4096 task.depth=8 task.heads=32 batch.micro_size=1 strategy=ddp cluster.gpu=t4",
    "two": "task.width=4096 task.depth=8 task.heads=32 batch.micro_size=16 strategy=ddp cluster.gpu=t4",
    "none": "task.width=8192 task.depth=12 task.heads=32 batch.micro_size=1 strategy=fsdp cluster.gpu=t4",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["micro", *(pytest.param(name, marks=pytest.mark.nightly) for name in JOBS if name != "micro")]
)
def test_a_job_that_follows_the_advice_fits(name: str, launch: Launch) -> None:
    job = ("cluster.workers_per_node=8", "task.seq_len=512", "batch.accumulation=1", *JOBS[name].split())

    def plan_of(*more: str) -> tuple[RunPlan, str]:
        words = [word for word in job if word.split("=")[0] not in {setting.split("=")[0] for setting in more}]
        plan = RunPlan.from_json(launch("plan", "--json", *words, *more).stdout)
        return plan, " ".join(note for note in plan.notes if "predicted to need" in note)

    plan, note = plan_of()
    assert "does not fit" in note
    found = re.search(r"It fits with (.+)\.$", note)
    assert (found is None) == (name == "none")
    if found is not None:
        settings = found[1].split()
        assert len({setting.split(".")[0] for setting in settings}) == (2 if name == "two" else 1)
        better, note = plan_of(*settings)
        assert "does not fit" not in note
        assert better.batch.global_size == plan.batch.global_size
        assert better.strategy.memory_bytes is not None
        own = next(each for each in better.strategy.forecasts if each.sync is better.strategy.sync)
        assert not excess_bytes(own, better.strategy.memory_bytes)
