"""Several optimizers, and those of a task itself, in whole jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import Launch
from tests.infra.checkpoints import assert_same_tensors, tensors
from tests.infra.runs import OWN, records

pytestmark = [
    pytest.mark.slow, pytest.mark.usefixtures("project"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]  # fmt: skip


def test_several_optimizers_are_resumed(launch: Launch, project: Path) -> None:
    """Adagrad has its state from the start: torch then took all optimizers for initialised, and lost the others'."""
    groups = (
        "optimizer.groups=[{match: '0.weight', _target_: torch.optim.Adagrad, lr: 0.01},"
        "{match: '2.weight', _target_: torch.optim.Muon, lr: 0.02}]"
    )
    schedule = [
        "schedule=custom",
        "schedule._target_=torch.optim.lr_scheduler.MultiStepLR",
        "schedule.milestones=[2,5]",
    ]
    own = [word for word in OWN if not word.startswith(("schedule", "run.name"))]
    for name, steps in (("whole", 6), ("part", 3)):
        done = launch("train", *own, groups, *schedule, f"run.name={name}", f"train.steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert launch("resume", "part", "train.steps=6").returncode == 0
    assert_same_tensors(*(project / f"runs/{name}/checkpoints/step_000006" for name in ("whole", "part")))


def test_a_tasks_own_optimizer_and_schedule(project: Path, launch: Launch) -> None:
    job = [word for word in OWN if not word.startswith("task.")] + ["task._target_=speech.tasks.OwnUpdates"]
    plan = launch("plan", *job)
    assert "the task's own optimizer, the task's own schedule" in plan.stdout
    assert launch("train", *job, "train.steps=3", "strategy=fsdp").returncode == 0
    rates = [each["train/lr"] for each in records(project / "runs" / "own")]
    assert rates == pytest.approx([0.02, 0.01, 0.005])
    for change, words in (
        ("optimizer.lr=0.1", "optimizer.lr: the task's own optimizer is used"),
        ("schedule.warmup_steps=1", "schedule.warmup_steps: the task's own schedule is used"),
    ):
        refused = launch("resume", "own", "train.steps=6", "--force", change)
        assert refused.returncode == 2
        assert words in refused.stderr
    assert launch("resume", "own", "train.steps=5", "strategy=ddp").returncode == 0
    assert [each["train/lr"] for each in records(project / "runs" / "own")][3:] == pytest.approx([0.0025, 0.00125])


WRONG = """
import torch
from launcher import Loss
from speech.tasks import Tagger

class Raises(Tagger):
    def optimizer(self, model):
        return torch.optim.SGD(model.no_such_method(), 0.1)

class Part(Tagger):
    def optimizer(self, model):
        return torch.optim.SGD([next(model.parameters())], 0.1)

class Nothing(Tagger):
    def schedule(self, optimizer, steps):
        return None

class Detached(Tagger):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.total.detach(), loss.items)
"""


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Raises", "The task's optimizer(model) raised AttributeError: 'Sequential' object has no attribute 'no_such"),
        ("Part", "task._target_=wrong.Part: optimizer(model): The optimizer lacks 2 of the model's trained parameters"),
        ("Nothing", "schedule(optimizer, steps): made a NoneType"),
        ("Detached", "The loss does not require a gradient"),  # in the calibration
    ],
)
def test_what_only_the_workers_find_is_wrong_input_too(project: Path, launch: Launch, task: str, words: str) -> None:
    (project / "wrong.py").write_text(WRONG)
    job = [word for word in OWN if not word.startswith(("task.", "run.calibrate_s"))]
    done = launch("train", *job, f"task._target_=wrong.{task}", "train.steps=3")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert ("wrong.py" in done.stderr) == (task == "Raises"), "the user's frames"


def test_arguments_of_a_group_change_on_resume_if_forced(project: Path, launch: Launch) -> None:
    job = (*OWN, "optimizer=sgd", "optimizer.groups=[{match: '0.weight', lr: 0.1}]", "checkpoint.every=1")
    assert launch("train", *job, "train.steps=2").returncode == 0
    for change, words in (
        ("optimizer.groups=[{match: '2.weight', lr: 0.1}]", "only the arguments of groups may change"),
        ("optimizer.groups=null", "only the arguments of groups may change"),
    ):
        refused = launch("resume", "own", "train.steps=3", "--force", change)
        assert refused.returncode == 2
        assert words in refused.stderr
    standing = "optimizer.groups=[{match: '0.weight', lr: 1e-30}]"  # so small that the weight stays
    assert launch("resume", "own", "train.steps=3", standing).returncode == 2
    resumed = launch("resume", "own", "train.steps=3", "--force", standing)
    assert resumed.returncode == 0, resumed.stderr
    before, after = (tensors(project / f"runs/own/checkpoints/step_{step:06d}") for step in (2, 3))
    changed = {name for name in before if name.startswith("model.") and not torch.equal(before[name], after[name])}
    assert changed
    assert "model.0.weight" in before
    assert "model.0.weight" not in changed


def test_an_option_that_needs_more_state_than_the_checkpoint_has(launch: Launch) -> None:
    job = (*OWN, "optimizer._target_=torch.optim.Adam", "optimizer.lr=0.01", "optimizer.amsgrad=false")
    assert launch("train", *job, "train.steps=2").returncode == 0
    refused = launch("resume", "own", "train.steps=3", "--force", "optimizer.amsgrad=true")
    assert "has no max_exp_avg_sq of " in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
