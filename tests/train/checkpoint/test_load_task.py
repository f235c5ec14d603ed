"""State that a task keeps itself: saved by its ``state_dict``, and restored at a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher import Loss
from launcher.errors import CallbackFailed, TaskError
from launcher.task import load_task
from tests.infra.runs import records
from tests.train.checkpoint.test_load_changed import DATA, attempt_at


class Base:
    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def train_data(self) -> list[Tensor]:
        return DATA


class Keeps(Base):
    """With a running centre, a queue that grows, and a number, which the loss reads."""

    def __init__(self) -> None:
        self.centre, self.queue, self.calls = torch.zeros(2), list[list[float]](), 0

    def loss(self, model: Any, batch: Tensor) -> Loss:
        rows = model(batch)
        past = torch.tensor(self.queue).mean(0) if self.queue else torch.zeros(2)
        total = (rows - self.centre - past - min(1.0, self.calls / 10)).square().sum()
        self.calls += 1
        self.centre = 0.9 * self.centre + 0.1 * rows.detach().mean(0)
        self.queue = [*self.queue, rows.detach()[0].tolist()][-3:]
        return Loss(total, len(batch))

    def state_dict(self) -> dict[str, Any]:
        return {"centre": self.centre, "rest": {"queue": self.queue, "calls": self.calls}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.centre, self.queue, self.calls = state["centre"], state["rest"]["queue"], state["rest"]["calls"]


class IsModule(Base, nn.Module):
    """A task that is a module: what it holds beside the model is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.teacher, self.student = nn.Linear(4, 2).requires_grad_(False), nn.Linear(4, 2)

    def model(self) -> nn.Module:
        return self.student

    @torch.no_grad()
    def follow(self, rows: Tensor) -> None:
        self.centre.mul_(0.9).add_(rows.mean(0), alpha=0.1)
        self.teacher.weight.lerp_(self.student.weight, 0.1)

    def loss(self, model: Any, batch: Tensor) -> Loss:
        rows, aim = model(batch), self.teacher(batch) - self.centre
        self.follow(rows)
        return Loss((rows - aim - 1).square().sum(), len(batch))


class CannotBeSaved(Keeps):
    def state_dict(self) -> dict[str, Any]:
        return {"queue": [self.centre]} if self.calls else {}


class OneMethod(Keeps):
    load_state_dict = None  # pyright: ignore


def run(place: Path, kind: type, steps: int) -> None:
    attempt_at(place, "run.calibrate_s=0", f"train.steps={steps}", target=f"{__name__}.{kind.__name__}")


def losses(place: Path) -> list[float]:
    return [record["train/loss"] for record in records(place)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Keeps, IsModule])
def test_a_resume_continues_with_the_tasks_state(tmp_path: Path, kind: type) -> None:
    run(tmp_path / "whole", kind, 7)
    for steps in (3, 7):
        run(tmp_path / "resumed", kind, steps)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


@pytest.mark.usefixtures("alone")
def test_state_that_cannot_be_saved_is_named_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CallbackFailed, match=r"The task failed in state_dict: the value of queue cannot be saved"):
        run(tmp_path, CannotBeSaved, 9)
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_task_has_both_methods() -> None:
    with pytest.raises(TaskError, match=r"has one of the methods state_dict\(\) and load_state_dict\(state\)"):
        load_task(f"{__name__}.OneMethod", {}, ())
