"""Config -> RunPlan: what is derived, what is refused, and that the file holds all of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from launcher.config.hydra import compose, compose_with_yaml, recompose
from launcher.config.schema import BatchConfig, BestMode, ClusterConfig, Config, Device, ScheduleKind, Sync, known_keys
from launcher.errors import ConfigError, UserError
from launcher.plan.host import Site
from launcher.plan.run_plan import RunPlan, SchedulePlan, TaskPlan
from launcher.plan.solve import solve, solve_best_mode, what_norms_do
from launcher.plan.windows import StreamInfo
from launcher.report.tables import plan_table
from launcher.train.optimizers import build_optimizer
from tests.helpers import make_plan, shown

BASE = make_plan()
TASK = TaskPlan.unknown(100)
EVERY = "train.eval_every=5"


def test_the_default_job() -> None:
    solved = make_plan(samples=232_423)
    assert (solved.batch.micro_size, solved.batch.accumulation, solved.batch.world_size) == (4, 8, 2)
    assert (solved.epoch.windows, solved.epoch.short_window) == (3632, 39)
    assert solved.strategy.sync is Sync.boundary
    assert solved.cluster.device is Device.cpu
    assert solved.train.steps == 300


def planned_of_batches(size: int | None, *overrides: str) -> RunPlan:
    stream = StreamInfo(ready=True, batch_size=size)
    config = compose(["cluster.workers_per_node=2", "batch.global_size=24", *overrides])
    return solve(config, Site(gpus=0, cores=2, cwd="/"), replace(BASE.task, samples=100, stream=stream), BASE.run)


def test_a_batch_in_tokens_is_refused_in_both_units() -> None:
    task = replace(BASE.task, tokens_per_sample=128)
    assert "8,192 tokens = 64 samples = " in shown(plan_table(make_plan("batch.global_tokens=8K", task=task)))
    with pytest.raises(ConfigError) as refused:
        make_plan("batch.global_tokens=8K", "batch.micro_size=3", "strategy=auto", task=task)
    assert str(refused.value) == (
        "batch.global_tokens=8K: is 64 samples of 128 tokens. batch.global_size=64 batch.micro_size=3: 64 samples "
        "cannot be shared by 2 ranks in units of 3.\n"
        "  Nearest choices: batch.global_size=60 or 66; or batch.micro_size=2 or 4; or unequal shares "
        "(batch.uneven=true)."
    )
    with pytest.raises(ConfigError, match=r"is 1,024 samples .*\n  Use batch\.global_size of 1000 or less\."):
        make_plan("batch.global_tokens=128K", task=task)


def test_ready_batches_are_the_micro_batches() -> None:
    solved = planned_of_batches(3)
    assert (solved.batch.micro_size, solved.batch.accumulation) == (3, 4)
    assert (solved.epoch.windows, solved.epoch.short_window) == (5, 4)
    assert planned_of_batches(None, "batch.micro_size=4").batch.accumulation == 3
    assert RunPlan.from_json(solved.to_json()) == solved


@pytest.mark.parametrize(
    ("size", "override", "error"),
    [(3, "batch.micro_size=4", "the training data has batches of 3 samples"),
     (None, "batch.accumulation=3", "batches of unknown size"), (3, "batch.micro_size=auto", "are used whole"),
     (3, "batch.on_oom=shrink", "batch.on_oom=shrink: the batches"), (3, "batch.short_window=drop", "ready batches"),
     (3, "batch.balance=length", "batch.balance=length: the batches"), (7, "batch.uneven=true", "a multiple of 7"),
     (9, "batch.norm=leave", "batch.global_size=18 or 36; or a DataLoader with batch_size=6 or 12."),
     (8, "batch.norm=leave", "batch_size=6 or 12; or 1 or 3 ranks (cluster.workers_per_node); or unequal shares"),
     (3, "train.data_shards=2", "divides streams only")],
)  # fmt: skip
def test_what_ready_batches_cannot_do(size: int | None, override: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        planned_of_batches(size, override)


@given(
    micro=st.integers(1, 16), accumulation=st.integers(1, 16), workers=st.integers(1, 16),
    samples=st.none() | st.integers(5000, 10**10), gradient_bytes=st.integers(4, 10**11),
)  # fmt: skip
def test_the_file_holds_the_whole_plan(
    micro: int, accumulation: int, workers: int, samples: int | None, gradient_bytes: int
) -> None:
    batch = BatchConfig(micro_size=micro, accumulation=accumulation)
    config = Config(batch=batch, cluster=ClusterConfig(workers_per_node=workers))
    task = dataclasses.replace(BASE.task, samples=samples, gradient_bytes=gradient_bytes)
    solved = solve(config, Site(gpus=0, cores=2, cwd="/"), task, BASE.run)
    assert RunPlan.from_json(solved.to_json()) == solved
    own, every = solved.strategy.forecast, solved.strategy.forecast_of(Sync.every)
    assert own is not None
    assert every is not None
    assert every.payload_bytes == (gradient_bytes * accumulation if workers > 1 else 0)
    assert own.payload_bytes == (gradient_bytes if workers > 1 else 0)
    assert own.wire_bytes == round(own.payload_bytes * 2 * (workers - 1) / workers)


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_plan().batch.micro_size = 3  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "lr", "betas", "eps"),
    [
        # k = 64/16 = 4; 1 - 4 x 0.1, 1 - 4 x 0.001; roots of 4
        (["optimizer.betas=[0.9,0.999]", "optimizer.reference_batch=16"], 0.2, (0.6, 0.996), 5e-9),
        # k = 64/256 = 1/4: to a smaller batch
        (["optimizer.betas=[0.8,0.98]", "optimizer.reference_batch=256"], 0.05, (0.95, 0.995), 2e-8),
        (["optimizer.betas=[0.8,0.98]", "optimizer.reference_batch=64"], 0.1, (0.8, 0.98), 1e-8),
        # k = 9
        (["batch.global_size=72", "optimizer.reference_batch=8", "optimizer.eps=3e-6"], 0.3, (0.1, 0.55), 1e-6),
    ],
)
def test_the_square_root_rule_scales_all_that_it_is_about(
    options: list[str], lr: float, betas: tuple[float, float], eps: float
) -> None:
    plan = make_plan("optimizer.lr=0.1", "optimizer.lr_scaling=sqrt", *options)
    assert plan.optimizer.lr == pytest.approx(lr)
    assert plan.optimizer.betas == pytest.approx(betas)
    assert plan.optimizer.eps == pytest.approx(eps)
    assert plan.optimizer.weight_decay == make_plan().optimizer.weight_decay
    assert RunPlan.from_json(plan.to_json()) == plan
    built = build_optimizer(nn.Linear(1, 1), plan.optimizer, Device.cpu).param_groups[0]
    assert (built["lr"], list(built["betas"])) == (plan.optimizer.lr, plan.optimizer.betas)
    assert built["eps"] == plan.optimizer.eps


@pytest.mark.parametrize("micro_size", [4, 32])
def test_warm_up_rises_to_the_scaled_rate_in_steps_whatever_the_accumulation(micro_size: int) -> None:
    rule = ("optimizer.lr=0.1", "optimizer.lr_scaling=linear", "optimizer.reference_batch=16", "schedule=constant")
    plan = make_plan(*rule, "schedule.warmup_steps=4", "batch.global_size=64", f"batch.micro_size={micro_size}")
    assert plan.batch.accumulation == 32 // micro_size
    rates = [plan.optimizer.lr * plan.schedule.factor(step, plan.train.steps) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_epochs_count_the_short_window() -> None:
    assert make_plan("train.epochs=3", samples=130).train.steps == 9
    assert make_plan("train.epochs=3", "batch.short_window=drop", samples=130).train.steps == 6


def torch_rates(steps: int, of: Callable[[SGD], LRScheduler]) -> list[float]:
    """The factors that a schedule of torch's own applies in each of ``steps`` steps."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = of(optimizer), list[float]()
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(("warmup", "minimum", "steps"), [(0, 0.0, 5), (10, 0.1, 110), (3, 0.0, 4), (1, 0.5, 300)])
def test_schedules_are_those_of_torch(warmup: int, minimum: float, steps: int) -> None:
    fall = steps - warmup
    cosine = torch_rates(fall, lambda optimizer: CosineAnnealingLR(optimizer, T_max=fall, eta_min=minimum))
    linear = torch_rates(fall, lambda optimizer: LinearLR(optimizer, 1.0, minimum, total_iters=fall))
    rise = [(step + 1) / warmup for step in range(warmup)]
    for kind, rates in ((ScheduleKind.cosine, cosine), (ScheduleKind.linear, linear)):
        schedule = SchedulePlan(kind=kind, warmup_steps=warmup, min_ratio=minimum)
        assert [schedule.factor(step, steps) for step in range(steps)] == pytest.approx([*rise, *rates])
        assert schedule.factor(steps, steps) == pytest.approx(minimum), "after the last step"


def test_schedules_in_numbers() -> None:
    linear = SchedulePlan(kind=ScheduleKind.linear, warmup_steps=0, min_ratio=0.0)
    assert [linear.factor(step, 5) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert linear.factor(0, 1) == 1, "the only step is taken at the full rate"
    wsd = SchedulePlan(kind=ScheduleKind.wsd, warmup_steps=2, min_ratio=0.5, decay_share=0.4)
    assert [wsd.factor(step, 10) for step in range(11)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5]
    )
    assert wsd.factor(7, 20) == 1, "a longer run decays later"
    assert [wsd.factor(step, 3) for step in range(4)] == pytest.approx([0.5, 1, 1, 0.5]), "most of it is warm-up"
    whole, line = dataclasses.replace(wsd, decay_share=1), dataclasses.replace(wsd, kind=ScheduleKind.linear)
    assert [whole.factor(step, 9) for step in range(9)] == [line.factor(step, 9) for step in range(9)]
    constant = SchedulePlan(kind=ScheduleKind.constant, warmup_steps=2, min_ratio=0.0)
    assert [constant.factor(step, None) for step in range(4)] == [0.5, 1, 1, 1]


def test_a_class_of_the_users_may_have_a_momentum_by_default() -> None:
    muon = ("optimizer._target_=torch.optim.Muon", "optimizer.lr=0.1", "optimizer.nesterov=true")
    assert make_plan(*muon).optimizer.arguments["nesterov"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=0"], "train.steps=0: must be at least 1"),
        (["train.steps=3", "train.epochs=1"], "train.epochs=1: train.steps=3 is set too"),
        (["train.clip_norm=-1"], "train.clip_norm=-1.0: must be above 0"),
        (["optimizer.lr=0"], "optimizer.lr=0.0: must be above 0"),
        (["optimizer.lr=nan"], "optimizer.lr=nan: must be above 0"),
        (["optimizer.momentum=0.9"], "optimizer.momentum=0.9: has no effect with optimizer=adamw"),
        (["optimizer.lr_scaling=linear"], "needs the global batch that lr was tuned for"),
        (["optimizer.reference_batch=64"], "has no effect with optimizer.lr_scaling=none"),
        (["optimizer.betas=[0.9]"], "must be two numbers"),
        (
            ["optimizer.lr_scaling=sqrt", "optimizer.reference_batch=4"],
            "optimizer.lr_scaling=sqrt: the global batch is 16 times optimizer.reference_batch, which makes 0.9 and "
            "0.95 of optimizer.betas -0.6 and 0.2; both must be above 0.\n  With these betas the rule reaches to 10 ",
        ),
        (["optimizer.lr_scaling=sqrt", "optimizer.reference_batch=8", "batch.global_size=80"], "to 10 times"),
        (
            ["optimizer=sgd", "optimizer.lr_scaling=sqrt", "optimizer.reference_batch=32"],
            "optimizer.lr_scaling=sqrt: is a rule for Adam, not for optimizer=sgd",
        ),
        (
            ["optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"],
            "optimizer.nesterov=true: has no effect without optimizer.momentum.",
        ),
        (["precision.init_scale=2"], "precision.init_scale=2.0: has no effect with precision=auto"),
        (["schedule=constant", "schedule.min_ratio=0.5"], "has no effect with schedule=constant"),
        (["strategy=single", "cluster.workers_per_node=2"], "trains on one rank, and this job has 2"),
        (["strategy.sync=boundary", "strategy.static_graph=true"], "strategy.static_graph=true: DDP loses gradients"),
        (["strategy.sync=boundary", "strategy.find_unused_parameters=true"], "strategy.find_unused_parameters=true"),
        (["strategy.sync=gather_once"], "strategy=ddp does not have this policy.\n  It has every, boundary and auto."),
        (["strategy=fsdp", "strategy.sync=replicas_at_boundary"], "It has every, boundary, gather_once and auto."),
        (["strategy=fsdp", "strategy.bucket_mb=5"], "strategy.bucket_mb=5.0: has no effect with strategy=fsdp.\n  It "),
        (["strategy=fsdp", "strategy.static_graph=true"], "has no effect with strategy=fsdp"),
        (["strategy=fsdp", "strategy.find_unused_parameters=true"], "has no effect with strategy=fsdp"),
        (["strategy=fsdp", "strategy.compress=bf16"], "strategy.compress=bf16: has no effect with strategy=fsdp"),
        (["strategy=fsdp", "strategy.compress=fp16"], "strategy.compress=fp16: has no effect with strategy=fsdp"),
        (["strategy=fsdp", "strategy.shard_size=2"], "strategy.shard_size=2: has no effect with strategy=fsdp"),
        (["strategy=fsdp", "strategy.cpu_offload=true"], "has no effect without GPUs"),
        (["strategy=hsdp"], "2 ranks cannot be split into several shard groups"),
        (["strategy=hsdp", "cluster.workers_per_node=4"], "strategy.shard_size=4 (the workers of one host)"),
        (
            ["strategy=hsdp", "cluster.workers_per_node=6", "strategy.shard_size=4", "batch.global_size=60"],
            "Use strategy.shard_size=2 or 3.",
        ),
        (["strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=1"], "Use strategy.shard_size=2."),
        (["powersgd.rank=2"], "powersgd.rank=2: has no effect with strategy.compress=none"),
        (["strategy.compress=powersgd", "precision=fp16"], "cannot be combined with precision=fp16"),
        (["precision.tf32=true"], "precision.tf32=true: has no effect without GPUs"),
        (["strategy.compress=fp16"], "Use strategy.compress=bf16, which has the range of fp32"),
        (["strategy.compress=powersgd", "powersgd.start=1"], "powersgd.start=1: must be at least 2"),
        (["precision.reduce_dtype=bf16"], "precision.reduce_dtype=bf16: has no effect with strategy=ddp"),
        (["cluster.device=cuda"], "this machine has 0 usable GPUs"),
        (["cluster.nodes=2"], "cluster.nodes=2: cluster=local is one machine"),
        (["batch.global_size=2000"], "the task has 1,000 samples, fewer than one window"),
        (["run.name=a/b"], "run.name=a/b: must be letters"),
        (["checkpoint.best=eval/accuracy"], "checkpoint.best_mode: is needed with checkpoint.best=eval/accuracy"),
        (["checkpoint.best=eval/loss_free/accuracy"], "checkpoint.best_mode: is needed"),
        (["checkpoint.best=train/loss"], "checkpoint.best=train/loss: is not a metric of the evaluation"),
        (["checkpoint.best=loss"], "checkpoint.best=loss: is not a metric of the evaluation"),
        (["checkpoint.best_mode=max"], "checkpoint.best_mode=max: has no effect without checkpoint.best."),
        (["train.patience=2", EVERY], "train.patience=2: has no effect without checkpoint.best."),
        (["train.patience=2", "checkpoint.best=eval/loss"], "train.patience=2: has no effect: the only evaluation"),
        (["train.patience=0", "checkpoint.best=eval/loss", EVERY], "train.patience=0: must be at least 1."),
        (["checkpoint.best=eval/loss", "checkpoint.enabled=false"], "checkpoint.best=eval/loss: has no effect"),
    ],
)
def test_impossible_values(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(*overrides)
    assert message in str(caught.value)


def test_more_workers_than_gpus() -> None:
    with pytest.raises(ConfigError, match=r"workers_per_node=4: this machine has 2 usable GPUs"):
        make_plan("cluster.workers_per_node=4", gpus=2)
    assert make_plan(gpus=2).cluster.device is Device.cuda


def test_the_plan_says_what_becomes_of_bf16_parameters() -> None:
    task = dataclasses.replace(BASE.task, parameters=1000, gradient_bytes=2400, narrow_parameters=800)
    wide = make_plan("strategy.sync=boundary", task=task)
    kept = make_plan("strategy.sync=boundary", "precision.parameters=keep", task=task)
    assert any("800 trained parameters" in note and "trained in fp32" in note for note in wide.notes)
    assert any("800 trained parameters" in note and "stay so" in note for note in kept.notes)
    assert [each.strategy.forecast and each.strategy.forecast.payload_bytes for each in (wide, kept)] == [4000, 2400]
    assert RunPlan.from_json(kept.to_json()) == kept


def test_streams() -> None:
    with pytest.raises(ConfigError, match="needs the last step"):
        make_plan("train.epochs=1", samples=None)
    with pytest.raises(ConfigError, match="a stream has no length"):
        make_plan("batch.short_window=drop", samples=None)
    assert make_plan("train.epochs=1", "schedule=constant", samples=None).train.steps is None


def test_a_warm_up_longer_than_the_run_is_noted() -> None:
    assert any("warmup_steps" in note for note in make_plan("train.steps=5").notes)


def test_batch_norm_s_option_is_for_models_with_one() -> None:
    assert make_plan("batch.norm=window", batch_norms=2).batch.norm == "window"
    with pytest.raises(ConfigError, match=r"batch.norm=window: has no effect: the model has no BatchNorm"):
        make_plan("batch.norm=window", batch_norms=0)


def test_a_ramp_and_what_follows_from_it() -> None:
    """The micro-batch suits every stage; a scaled learning rate is that of the last one, and said to be."""
    plan = make_plan("batch.ramp=[[10,4],[10,12]]", "optimizer.lr_scaling=sqrt", "optimizer.reference_batch=16")
    assert plan.batch.micro_size == 2
    assert [plan.batch.accumulation_at(window) for window in (0, 9, 10, 19, 20)] == [1, 1, 3, 3, 16]
    assert any("lr_scaling is for the 64 samples after batch.ramp" in note for note in plan.notes)
    with pytest.raises(ConfigError, match=r"60 samples cannot be shared.*\n  Nearest choices: 56;"):
        make_plan("batch.ramp=[[10,60]]", "batch.micro_size=4")


def test_a_hang_is_found_later_than_a_stop_takes_or_never() -> None:
    assert make_plan().train.hang_timeout == 1800
    assert make_plan("train.hang_timeout=null").train.hang_timeout is None
    with pytest.raises(ConfigError, match=r"train.hang_timeout=20.0: must be above cluster.grace_s=30"):
        make_plan("train.hang_timeout=20")
    with pytest.raises(ConfigError, match=r"train.straggler_share=2.0: must be between 0 and 1"):
        make_plan("train.straggler_share=2")


def test_a_plan_of_another_version_is_refused() -> None:
    fields = json.loads(make_plan().to_json())
    with pytest.raises(UserError, match="another version"):
        RunPlan.from_json(json.dumps(fields | {"format": 99}))
    for changed, problem in (
        ({key: value for key, value in fields.items() if key != "added"}, "lacks the key 'added'"),
        (fields | {"added": 3}, "has a value of another kind: 3 is no dict"),
    ):
        with pytest.raises(
            UserError, match=rf"{problem}: another version of launcher wrote it, or the file was changed"
        ):
            RunPlan.from_json(json.dumps(changed))


def test_null_is_the_default_or_off_for_every_key() -> None:
    """All keys at once, but those for which null is ambiguous: they and the groups refuse it with one message each."""
    refused = {
        "cluster.kind", "strategy.kind", "optimizer.kind", "schedule.kind", "outer.kind", "optimizer.lr", "train.seed",
        "checkpoint.enabled", "wandb.mode",
    }  # fmt: skip
    accepted = [key for key in known_keys() if "." in key and key not in refused]
    off = ("train.clip_norm", "train.hang_timeout", "train.straggler_share")
    config, yaml = compose_with_yaml([f"{key}=null" for key in accepted])
    default = Config()
    for key in accepted:
        group, _, name = key.partition(".")
        name = {"_target_": "target"}.get(name, name)
        value, usual = (getattr(of.groups()[group], name) for of in (config, default))
        assert value == usual or (value is None and key in off), key
    assert recompose(yaml, [])[0] == config
    composed = compose()
    for key in accepted:  # alone, beside the values of the default job
        group, _, name = key.partition(".")
        name = {"_target_": "target"}.get(name, name)
        one = dataclasses.replace(composed.groups()[group], **{name: getattr(config.groups()[group], name)})
        added = {"added": composed.added | {group: one}}
        changed = dataclasses.replace(composed, **(added if group in composed.added else {group: one}))
        solve(changed, Site(gpus=0, cores=2, cwd="/nowhere"), BASE.task, BASE.run)
    for key in {*refused, *known_keys()} - set(accepted):
        with pytest.raises(ConfigError) as caught:
            compose([f"{key}=null"])
        assert str(caught.value).startswith(key), caught.value
        assert "has no meaning here" in str(caught.value) or "Allowed: " in str(caught.value)


WINDOW = ("batch.global_size=32", "batch.micro_size=4", "cluster.workers_per_node=2")  # accumulation 4


def said(layers: int, *overrides: str) -> str | None:
    return what_norms_do(layers, make_plan(*WINDOW, *overrides).batch)


def test_statistics_of_a_part_of_the_window_are_said_and_what_else_there_is() -> None:
    assert said(0) is None
    for layers, overrides, words in (
        (3, (), "3 BatchNorm layers: statistics of 4 samples"),
        (3, (), "of the 32 of a window"),
        (3, (), "batch.norm=sync|freeze|window"),
        (1, ("batch.norm=sync",), "1 BatchNorm layer: statistics of 8 samples"),
        (1, ("batch.norm=sync",), "batch.norm=freeze|window"),
        (3, ("batch.norm=window",), "runs at least 6 times more"),
        (3, ("batch.norm=freeze",), "model() comes with"),
        (2, ("batch.norm=sync", "batch.micro_size=16"), "of the whole window"),
        (2, ("batch.norm=window", "batch.micro_size=16"), "of the whole window"),
        (2, ("batch.norm=sync", "cluster.workers_per_node=1"), "no effect on one rank"),
    ):
        assert words in (said(layers, *overrides) or ""), (overrides, words)


def test_activations_computed_again_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\.norm=window: does not work with strategy\.recompute=blocks"):
        make_plan(*WINDOW, "batch.norm=window", "strategy.recompute=blocks")
    make_plan(*WINDOW, "batch.norm=sync", "strategy.recompute=blocks")


def test_a_loss_of_the_whole_window_has_passes_of_its_own() -> None:
    task = replace(make_plan(batch_norms=2).task, window_loss=True)
    with pytest.raises(ConfigError, match=r"batch\.norm=window: does not work with a task that has window_loss"):
        make_plan(*WINDOW, "batch.norm=window", task=task)
    note = make_plan(*WINDOW, "batch.norm=sync", task=task).notes[-1]
    assert "each micro-batch runs forward once more" in note


def test_a_short_window_with_micro_batches_of_one_sample_is_said_with_a_way_out() -> None:
    one, two = "cluster.workers_per_node=1", "cluster.workers_per_node=2"

    def noted(samples: int, *overrides: str, batch_norms: int = 1) -> list[str]:
        sizes = ("batch.global_size=16", "batch.micro_size=4", "train.epochs=1")
        plan = make_plan(*sizes, *overrides, samples=samples, batch_norms=batch_norms)
        return [note for note in plan.notes if "more than 1 value per channel" in note]

    assert "short window of 1 sample" in noted(33, one)[0]
    assert "Use batch.short_window=drop, another batch.global_size, batch.norm=window" in noted(33, two)[0]
    full = noted(35, two, "batch.global_size=5", "batch.micro_size=2", "batch.uneven=true")[0]
    assert "A window of 5 samples has" in full
    assert "Use a larger batch.micro_size or batch.global_size, batch.norm=window" in full
    for samples in (35, 34):  # shares of 2 and 1, of 1 and 1
        assert noted(samples, two)
    for samples, overrides in (
        (34, [one]), (32, [two]), (36, [two]), (33, [one, "batch.short_window=drop"]), (33, [two, "batch.norm=sync"]),
    ):  # fmt: skip
        assert not noted(samples, *overrides)
    assert not noted(33, one, batch_norms=0)


@pytest.mark.parametrize(
    ("samples", "overrides", "said"),
    [
        (33, [], "short window of 1 sample at the end of each epoch of 33 samples"),
        (33, ["train.epochs=null", "train.steps=3"], "short window of 1 sample"),
        (33, ["train.epochs=null", "train.steps=2"], None),  # ends before it
        (33, ["batch.short_window=drop"], None),
        (33, ["batch.norm=window"], None),
        (35, ["cluster.workers_per_node=2"], "short window of 3 samples"),  # one rank has one of them
        (34, [], None),
        (34, ["cluster.workers_per_node=2"], "short window of 2 samples"),
        (32, ["batch.micro_size=1"], "batch.micro_size=1: .*A window of 16 samples"),
        (33, ["batch.micro_size=1"], "batch.micro_size=1: "),
        (32, ["batch.global_size=5", "batch.micro_size=2", "batch.uneven=true", "cluster.workers_per_node=2"], "of 5"),
    ],
)
def test_a_layer_that_fails_on_one_sample_is_refused_where_the_run_has_such_a_micro_batch(
    samples: int, overrides: list[str], said: str | None
) -> None:
    def plan(layer: str) -> RunPlan:
        task = replace(make_plan(batch_norms=1).task, samples=samples, one_value_norm=layer)
        sizes = ("batch.global_size=16", "batch.micro_size=4", "train.epochs=1", "cluster.workers_per_node=1")
        return make_plan(*sizes, *overrides, task=task)

    assert not [note for note in plan("").notes if "one sample" in note], "no layer of it fails: images, say"
    if said is None:
        plan("net.1")
        return
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        plan("net.1")
    for text in ("the BatchNorm net.1 ", "batch.global_size", "batch.norm=window"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], None),
        (["checkpoint.best=eval/loss"], BestMode.min),
        (["checkpoint.best=eval/loss_box"], BestMode.min),
        (["checkpoint.best=eval/far/Perplexity"], BestMode.min),
        (["checkpoint.best=eval/loss", "checkpoint.best_mode=max"], BestMode.max),
        (["checkpoint.best=eval/accuracy", "checkpoint.best_mode=max"], BestMode.max),
        (["checkpoint.best=eval/loss", EVERY, "train.patience=2", "checkpoint.enabled=false"], BestMode.min),
    ],
)
def test_the_direction_follows_from_the_name_or_is_given(overrides: list[str], mode: BestMode | None) -> None:
    plan = make_plan(*overrides)
    assert plan.checkpoint.best_mode is mode
    assert RunPlan.from_json(plan.to_json()).checkpoint.best_mode is mode


@pytest.mark.parametrize(
    ("sets", "metric", "words"),
    [
        ((), "eval/loss", "the task has no held-out data, so no evaluation takes place."),
        (("dev", "noisy"), "eval/nosy/loss", "eval_data() has no set 'nosy'.\n  did you mean 'noisy'?"),
        (("dev", "noisy"), "eval/noisy/loss", None),
        (("dev", "noisy"), "eval/loss", None),
        (("",), "eval/a/loss", None),  # the task's metric may have such a name
        (None, "eval/far/loss", None),
    ],
)
def test_the_sets_are_known(sets: tuple[str, ...] | None, metric: str, words: str | None) -> None:
    config = compose([f"checkpoint.best={metric}"])
    task = dataclasses.replace(TASK, eval_sets=sets)
    if words is None:
        assert solve_best_mode(config.checkpoint, config.train, task) is BestMode.min
        return
    with pytest.raises(ConfigError, match=re.escape(words)):
        solve_best_mode(config.checkpoint, config.train, task)


@pytest.mark.parametrize("key", ["train.eval_every", "checkpoint.every"])
def test_what_is_due_at_the_end_of_an_epoch(key: str) -> None:
    plan = make_plan(f"{key}=epoch", "train.log_every=100", "train.steps=100", "batch.global_size=400")
    plan = RunPlan.from_json(plan.to_json())
    assert [window for window in range(9) if plan.records(window + 1, window)] == [2, 5, 8], "1000 samples, 3 windows"
    skipped = [window for window in range(2, 9) if plan.records(window, window)]
    assert skipped == [2, 3, 5, 6, 8], "one window was skipped: perhaps the last of an epoch"
    assert make_plan(f"{key}=epoch", "train.epochs=2", "schedule=constant", samples=None), "it ends"
    with pytest.raises(ConfigError, match=f"(?s){key}=epoch: the training data is a stream .*{key}=500, or train.epoc"):
        make_plan(f"{key}=epoch", samples=None)
    for wrong in ("epochs", "-1"):
        with pytest.raises(ConfigError, match=f"{key}={wrong}: must be a number of optimizer steps, .* or epoch."):
            make_plan(f"{key}={wrong}")


def test_a_single_evaluation_is_pointed_out() -> None:
    (note,) = [note for note in make_plan("checkpoint.best=eval/loss").notes if "checkpoint.best" in note]
    assert "one evaluation to choose from" in note
    assert not [note for note in make_plan("checkpoint.best=eval/loss", EVERY).notes if "checkpoint.best" in note]
