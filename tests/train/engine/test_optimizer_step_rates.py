"""The learning rates that are applied are the schedule's, the plan's or the user's own, and are the ones reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from launcher import Engine
from tests.helpers import make_plan

STEPS, LR = 6, 0.5
WARM = ["schedule.warmup_steps=2"]
FLAT = ["schedule=constant", "schedule.warmup_steps=0"]


class NoSchedule:
    def step(self) -> None: ...


class Halved:
    """The rate set by hand, as ReduceLROnPlateau does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.optimizer.param_groups[0]["lr"] /= 2


OWN: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: NoSchedule(),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "by hand": Halved,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("own", "options", "wanted"),
    [
        ("none", ["schedule=linear", "schedule.min_ratio=0", *WARM], [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]),
        ("none", FLAT, [LR] * STEPS),
        ("lambda", FLAT, [LR / (1 + step) for step in range(STEPS)]),
        ("lambda", ["schedule=cosine", *WARM], [LR / (1 + step) for step in range(STEPS)]),
        ("exponential", FLAT, [LR * 0.5**step for step in range(STEPS)]),
        ("by hand", FLAT, [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ("by hand", ["schedule=linear", *WARM], [0.25, 0.5, 0.5, 0.1875, 0.1875, 0.1875]),
    ],
)
def test_the_rate_reported_is_the_rate_applied(
    own: str, options: list[str], wanted: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        "cluster.workers_per_node=1", "batch.global_size=4", "batch.micro_size=2", f"train.steps={STEPS}",
        "train.loader_workers=0", "precision=fp32", *options, samples=16,
    )  # fmt: skip
    optimizer = torch.optim.SGD((model := nn.Linear(3, 1)).parameters(), lr=LR)
    engine, schedule, applied, reported = Engine(model, optimizer, plan), OWN[own](optimizer), list[float](), []
    optimizer.register_step_pre_hook(lambda *_: applied.append(optimizer.param_groups[0]["lr"]))
    for window in engine.windows([torch.full((3,), float(index)) for index in range(16)]):
        for batch in window:
            engine.backward(1e-6 * engine.model(batch).square().sum(), len(batch))
        reported.append(engine.step().lr)
        schedule.step()
    assert applied == pytest.approx(wanted)
    assert reported == applied
    assert capsys.readouterr().out.count("outside of the engine") == (own != "none"), "once a run"
