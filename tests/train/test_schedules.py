"""Learning rate schedules by their path: state in a checkpoint, and mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from launcher.config.hydra import compose
from launcher.errors import TaskError, UserError, WrongCheckpoint
from launcher.plan.run_plan import SchedulePlan, solved_part
from launcher.train.optimizers import as_one, members_of
from launcher.train.schedules import build_schedule, require_length, require_schedule, restore_schedule, schedule_state
from tests.helpers import make_plan
from tests.train.test_optimizers import built


def schedule_of(optimizer: torch.optim.Optimizer, *overrides: str) -> Any:
    return build_schedule(optimizer, solved_part(SchedulePlan, compose(overrides).schedule), 20)


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
