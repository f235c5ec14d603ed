"""Run by torchrun in test_preserved_state.py. argv: overrides of a plan.

Prints from rank 0 the loss of each step with a calibration, without one, and of plain PyTorch with the whole window as
one batch.
"""

from __future__ import annotations

import sys

import torch

from launcher import Engine, make_plan
from launcher.train.world import World
from tests.infra.workers import leave_group, print_on_rank_0
from tests.train.engine.clocks import WIDTH, Clocks, Counting

SAMPLES, STEPS = 8, 6


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def by_engine(calibrate_s: float) -> tuple[list[float], bool]:
    task = Counting()
    plan = make_plan(
        [
            "strategy=ddp", "precision=fp32", f"batch.global_size={SAMPLES}", f"train.steps={STEPS}", "optimizer=sgd",
            "schedule=constant", "schedule.warmup_steps=0", "train.clip_norm=null", "train.loader_workers=0",
            f"run.calibrate_s={calibrate_s}", f"cluster.workers_per_node={World.here().size}", *sys.argv[1:],
        ],
        samples=SAMPLES,
    )  # fmt: skip
    model = Clocks(norm=False)
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.05), plan, owner=task)
    losses = []
    for window in engine.windows(list(data()), forward=task.loss):
        for batch in window:
            engine.backward(task.loss(engine.model, batch))
        losses.append(engine.step().loss)
    assert model.numbers() == [STEPS * plan.batch.accumulation] * 6
    return losses, bool(engine.calibrated and engine.calibrated.rounds)


def plain() -> list[float]:
    task, model = Counting(), Clocks(norm=False)
    optimizer = torch.optim.SGD(model.student.parameters(), 0.05)
    losses = []
    for _ in range(STEPS):
        loss = task.loss(model, data()).total / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


(measured, calibrated), (without, _) = by_engine(1000.0), by_engine(0)
assert calibrated
print_on_rank_0({"calibrated": measured, "not calibrated": without, "plain": plain()})
leave_group()
