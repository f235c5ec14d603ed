"""Several optimizers, and those of a task itself, in whole jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.infra.runs import OWN, records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("project")]


def test_several_optimizers_survive_interruptions(launch: Launch) -> None:
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
    done = launch("drill", *own, groups, *schedule)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit by bit" in done.stdout


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
