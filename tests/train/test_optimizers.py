"""Optimizers by their path: groups, several at once, schedules, mistakes, and equality with what is written by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from launcher.config.hydra import compose
from launcher.config.schema import Device
from launcher.errors import EngineMisuse, TaskError, UserError, WrongCheckpoint
from launcher.plan.optimizer_plan import solve_optimizer
from launcher.plan.run_plan import SchedulePlan, extended
from launcher.train.optimizers import (
    CombinedOptimizer,
    as_one,
    build_optimizer,
    build_schedule,
    members_of,
    require_length,
    require_schedule,
    restore_schedule,
    schedule_state,
)
from tests.helpers import make_plan, torchrun


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def built(*overrides: str) -> torch.optim.Optimizer:
    return build_optimizer(model(), solve_optimizer(compose(overrides).optimizer, 64), Device.cpu)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategies"), [(2, ["ddp", "fsdp"]), (4, ["hsdp/strategy.shard_size=2"])])
def test_groups_and_several_optimizers_are_those_written_by_hand(
    world: int, strategies: list[str], tmp_path: Path
) -> None:
    cases = [f"strategy={strategy}" for strategy in strategies]
    out = torchrun(Path(__file__).parent / "optimizers_worker.py", cases, world, tmp_path).splitlines()
    seen = [json.loads(line) for line in out if line.startswith("{")]
    assert [each["case"] for each in seen] == cases
    for each in seen:
        assert each["worst"] < 1e-5, each
        assert each["groups"] == 4, "the group of no parameter but those of others is left out"


def test_a_class_gets_its_arguments() -> None:
    made = built("optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1", "optimizer.alpha=0.5")
    assert type(made) is torch.optim.RMSprop
    assert (made.param_groups[0]["lr"], made.param_groups[0]["alpha"]) == (0.1, 0.5)
    made = built("optimizer._target_=torch.optim.Adam", "optimizer.lr=0.1", "optimizer.betas=[0.5,0.6]")
    assert made.param_groups[0]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["torch.optim.RMSprop", "optimizer.alfa=1"], "optimizer.alfa=1: torch.optim.RMSprop has no such argument"),
        (["torch.optim.RMSprop", "optimizer.alfa=1"], "did you mean 'optimizer.alpha'"),
        (["torch.optim.RMSprop", "optimizer.alpha=x"], "optimizer.alpha=x: torch.optim.RMSprop takes float here"),
        (["torch.optim.RMSprop", "optimizer.centered=1"], "optimizer.centered=1: torch.optim.RMSprop takes bool here"),
        (["torch.optim.Adam", "optimizer.betas=[0.5]"], "optimizer.betas=[0.5]: torch.optim.Adam takes"),
        (["torch.optim.Adam", "optimizer.eps=-1"], "optimizer._target_=torch.optim.Adam: ValueError: Invalid epsilon"),
        (["torch.optim.LBFGS"], "needs a closure"),
        (["torch.optim.LBFGS", "optimizer.groups=[{match: bias, weight_decay: 0}]"], "LBFGS: needs a closure"),
        (["torch.optim.SparseAdam"], "optimizer._target_=torch.optim.SparseAdam: takes sparse gradients only"),
        (["torch.optim.Muon"], "updates matrices only, and these parameters of the group are none: 0.bias, 1.weight, "),
        (["torch.optim.SGD", "optimizer.groups=[{match: '^[12]', _target_: torch.optim.Muon, lr: 0.1}]"],
         'optimizer.groups[0]._target_=torch.optim.Muon: updates matrices only, and these parameters of the group are '
         'none: 1.weight, 1.bias, 2.bias.\n  Put a group that takes them before it in optimizer.groups, such as '
         '{match: "ndim<2"}.'),
        (["torch.nn.Linear", "optimizer.out_features=3"], "optimizer"),
        (["torch.optim.RMSprop", "optimizer.groups=[{match: bias, alhpa: 0.1}]"], "optimizer.groups[0].alhpa=0.1: "),
        (["torch.optim.RMSprop", "optimizer.groups=[{match: bias, alpha: x}]"], "optimizer.groups[0].alpha=x: "),
        (["torch.optim.Nothing"], "has no 'Nothing'"),
        (["nowhere.Nothing"], "optimizer._target_=nowhere.Nothing: no module 'nowhere'"),
    ],
)  # fmt: skip
def test_a_mistake_names_key_and_value(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        built(f"optimizer._target_={overrides[0]}", "optimizer.lr=0.1", *overrides[1:])
    assert words in str(raised.value)


def schedule_of(optimizer: torch.optim.Optimizer, *overrides: str) -> Any:
    return build_schedule(optimizer, extended(SchedulePlan, compose(overrides).schedule), 20)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["MultiStepLR", "schedule.milestones=[2,5]", "schedule.gamma=0.1"], MultiStepLR),
        (["OneCycleLR", "schedule.max_lr=1", "schedule.total_steps=20"], OneCycleLR),
    ],
)
def test_a_schedule_continues_from_its_saved_state(overrides: list[str], kind: type) -> None:
    words = [f"schedule._target_=torch.optim.lr_scheduler.{overrides[0]}", *overrides[1:]]

    def rates(schedule: Any, count: int) -> list[float]:
        seen: list[float] = []
        for _ in range(count):
            seen.append(schedule.optimizer.param_groups[0]["lr"])
            schedule.optimizer.step()
            schedule.step()
        return seen

    whole = schedule_of(built(), *words)
    assert type(whole) is kind
    expected = rates(whole, 12)
    first = schedule_of(built(), *words)
    seen = rates(first, 4)
    state = json.loads(json.dumps(schedule_state(first)))
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in first.optimizer.param_groups
    ]
    second = schedule_of(built(), *words)
    for group, values in zip(second.optimizer.param_groups, options, strict=True):
        group.update(values)
    restore_schedule(second, state)
    assert seen + rates(second, 8) == expected
    assert len(set(expected)) > 2


def test_a_schedule_that_ends_before_the_run_is_refused() -> None:
    words = "schedule._target_=torch.optim.lr_scheduler.OneCycleLR", "schedule.max_lr=1", "schedule.total_steps=20"
    schedule = schedule_of(built(), *words)
    require_length(schedule, 20)
    require_length(schedule, None)
    with pytest.raises(UserError, match=r"schedule.total_steps=20: OneCycleLR ends before the run's 21 steps"):
        require_length(schedule, 21)


def test_schedules_that_cannot_be_stepped_are_refused() -> None:
    with pytest.raises(TaskError, match="needs a metric at each step"):
        schedule_of(built(), "schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau")
    with pytest.raises(UserError, match=r"schedule.T_maxx=3: [^\n]*no such argument.\n  did you mean 'schedule.T_max'"):
        schedule_of(built(), "schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR", "schedule.T_maxx=3")
    with pytest.raises(UserError, match=r"schedule.T_max=None: [^\n]*needs this argument|schedule.T_max: "):
        schedule_of(built(), "schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR")
    with pytest.raises(TaskError, match="made a dict"):
        require_schedule({}, "schedule(optimizer, steps)")
    with pytest.raises(TaskError, match="made a MultiStepLR of another optimizer"):
        require_schedule(MultiStepLR(built(), [2]), "schedule(optimizer, steps)", built())
    pair = as_one([built(), built()])
    for one in (pair, members_of(pair)[1]):
        require_schedule(MultiStepLR(one, [2]), "schedule(optimizer, steps)", pair)


def test_several_optimizers_are_saved_and_restored_as_one() -> None:
    def pair(seed: int) -> tuple[nn.Module, CombinedOptimizer]:
        torch.manual_seed(seed)
        network = model()
        first, second = list(network[0].parameters()), [*network[1].parameters(), *network[2].parameters()]
        return network, CombinedOptimizer([AdamW(first, 0.1), SGD(second, 0.2, momentum=0.9)])

    def steps(network: nn.Module, optimizer: CombinedOptimizer, count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            network(torch.full((2, 3), 1.0 + number)).square().sum().backward()
            optimizer.step()

    one, combined = pair(0)
    steps(one, combined, 3)
    other, restored = pair(1)
    other.load_state_dict(one.state_dict())
    restored.load_state_dict(copy.deepcopy(combined.state_dict()))
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.2]
    restored.param_groups[1]["lr"] = combined.param_groups[1]["lr"] = 0.01
    assert restored.optimizers[1].param_groups[0]["lr"] == 0.01, "groups are shared"
    for network, optimizer in ((one, combined), (other, restored)):
        steps(network, optimizer, 2)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_another_class_is_refused() -> None:
    one = schedule_of(built(), "schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=2")
    with pytest.raises(WrongCheckpoint, match="has the state of the learning rate schedule StepLR, and the run now"):
        restore_schedule(schedule_of(built()), schedule_state(one))


def test_keys_that_the_built_in_schedules_have_reach_a_class() -> None:
    words = ["schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=2", "schedule.warmup_steps=3"]
    plan = make_plan(*words)
    with pytest.raises(UserError, match=r"schedule.warmup_steps=3: [^\n]* has no such argument"):
        build_schedule(built(), plan.schedule, 20)


def test_rates_that_are_not_the_launchers_are_not_scaled() -> None:
    words = ["schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=2"]
    with pytest.raises(UserError, match=r"optimizer.lr_scaling=linear: has no effect on an optimizer or a schedule"):
        make_plan(*words, "optimizer.lr_scaling=linear", "optimizer.reference_batch=2")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, "a NoneType, not a torch optimizer"),
        ([], "is empty"),
        ([torch.optim.LBFGS([torch.zeros(1)])], "needs a closure"),
    ],
)
def test_what_is_no_optimizer(wrong: Any, words: str) -> None:
    with pytest.raises(EngineMisuse, match=words):
        as_one(wrong)
