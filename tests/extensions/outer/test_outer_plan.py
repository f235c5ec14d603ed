"""Outer steps: which jobs can be divided into sites, and what is refused with one message each."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.errors import ConfigError
from launcher.plan.batch import Batch, RampStage
from launcher.plan.run_plan import RunPlan
from tests.helpers import make_plan

JOB = ("outer=diloco", "cluster.workers_per_node=4", "batch.short_window=drop")


def outer_plan(*overrides: str) -> RunPlan:
    return make_plan(*JOB, *overrides)


@pytest.mark.parametrize(
    ("overrides", "sites", "size"),
    [
        (["outer.group=1"], 4, 1),
        (["outer.group=2"], 2, 2),
        (["outer.group=shard", "strategy=hsdp", "strategy.shard_size=2"], 2, 2),
    ],
)
def test_the_ranks_are_divided_into_sites(overrides: list[str], sites: int, size: int) -> None:
    plan = outer_plan(*overrides)
    assert plan.sites is not None
    assert plan.sites.count == sites
    assert plan.batch.world_size == 4, "the plan is that of the whole job"
    part = plan.batch.of_site(sites)
    assert (part.world_size, part.global_size, part.accumulation) == (
        size, plan.batch.global_size // sites, plan.batch.accumulation,
    )  # fmt: skip
    assert part.of_all_sites == plan.batch
    assert RunPlan.from_json(plan.to_json()) == plan
    assert any("not the gradient of one global batch" in note for note in plan.notes)


def test_the_ramp_is_divided_too() -> None:
    ramp = (RampStage(windows=3, global_size=12), RampStage(windows=2, global_size=24))
    batch = Batch(global_size=48, micro_size=2, accumulation=6, world_size=4, ramp=ramp)
    part = batch.of_site(2)
    assert [stage.global_size for stage in part.ramp] == [6, 12]
    assert part.of_all_sites == batch
    assert dataclasses.replace(part, sites=1) == batch.of_site(2).of_site(1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["outer.group=3"], r"outer.group=3: does not divide 4 ranks.*\n  Use outer.group=1 or 2"),
        (["outer.group=node"], r"outer.group=node \(4 ranks\): does not divide 4 ranks"),
        (["outer.group=host"], "outer.group=host: must be node, shard, or a number of ranks"),
        (["outer.group=shard"], "outer.group=shard: strategy=ddp has no shard groups"),
        (["outer.group=1", "outer.fragments=51"], "outer.fragments=51: must be at most 50"),
        (["outer.group=1", "outer.delay=50"], "outer.delay=50: must be at most 49"),
        (["outer.group=1", "outer.mixing=0.5"], "outer.mixing=0.5: has no effect without outer.delay"),
        (["outer.group=1", "schedule.warmup_steps=60"], "outer.every=50: is below schedule.warmup_steps=60"),
        (["outer.group=1", "precision=fp16"], "precision=fp16: lets a site skip a step"),
        (["outer.group=1", "train.on_nonfinite=skip"], "train.on_nonfinite=skip: lets a site skip a step"),
        (["outer.group=1", "checkpoint.best=eval/loss"], "checkpoint.best=eval/loss: does not work with outer=diloco"),
        (["outer.group=1", "batch.uneven=true", "batch.global_size=63"], "outer=diloco needs equal shares"),
        (["outer.group=1", "outer.momentum=2"], "outer.momentum=2.0: must be between 0 and 1"),
    ],
)
def test_one_message_for_each_mistake(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outer_plan(*overrides)


def test_a_key_without_outer_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outer\.every=3: has no effect with outer=none"):
        make_plan("outer.every=3")
