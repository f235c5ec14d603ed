"""Learning rates that a loop of one's own applies, run by torchrun in test_optimizer_step_rates.py.

Prints one JSON object from rank 0 for each case: the rates that the optimizer applied, and those that were reported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from launcher import Engine, make_plan
from tests.infra.workers import leave_group, print_on_rank_0

STEPS, LR = 6, 0.5


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


def run(own: str, options: list[str]) -> dict[str, Any]:
    data = [torch.full((3,), float(index)) for index in range(16)]
    sizes = ["batch.global_size=4", "batch.micro_size=1", f"train.steps={STEPS}", "train.loader_workers=0"]
    plan = make_plan([*sizes, "precision=fp32", *options], samples=len(data))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = Engine(model, optimizer, plan)
    schedule = OWN[own](optimizer)
    applied: list[float] = []
    reported: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: applied.append(optimizer.param_groups[0]["lr"]))
    for window in engine.windows(data):
        for batch in window:
            engine.backward(1e-6 * engine.model(batch).square().sum(), len(batch))
        reported.append(engine.step().lr)
        schedule.step()
    assert all(map(math.isfinite, applied))
    return {"applied": applied, "reported": reported}


def main() -> None:
    for line in sys.argv[1:]:
        own, *options = line.split("/")
        seen = run(own, options)
        print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
