"""A resume with changes: more parameters are trained, a buffer has another shape, optimizer arguments are forced."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from launcher import Engine, make_plan
from launcher.callbacks.ema import Ema
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import load, save
from tests.train.checkpoint.stateful_optimizers import Remembers

DATA = list(torch.sin(torch.arange(48.0)).reshape(12, 4))
pytestmark = pytest.mark.usefixtures("alone")


class Grows(nn.Module):
    """With a buffer that gets a row at each call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return self.out(x)


def engine_of(
    place: Path, model: nn.Module, *callbacks: Any, forced: tuple[str, ...] = (), optimizer: Optimizer | None = None
) -> Engine:
    plan = make_plan(
        [f"run.dir={place}", "run.name=a", "batch.global_size=4", "train.steps=8", "cluster.device=cpu",
         "precision=fp32", "train.loader_workers=0"], samples=len(DATA),
    )  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plan = dataclasses.replace(plan, forced=forced)
    return Engine(model, optimizer or AdamW(trained, 0.05), plan, callbacks=callbacks)


def run(engine: Engine, until: int) -> Path:
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward((engine.model(batch) - 1).square().sum(), len(batch))
        if engine.step().step == until:
            break
    return save.write(save.take_snapshot(engine, Fence.here(engine.plan.paths)))


def test_averages_of_parameters_that_were_frozen_start_with_their_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    place = run(engine_of(tmp_path, model, Ema()), 3)
    thawed, averages = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), Ema()
    engine = engine_of(tmp_path, thawed, averages)
    load.load(engine, place)
    engine.callbacks.start(engine)
    assert averages.averages["0.weight"].equal(model.state_dict()["0.weight"])
    assert not averages.averages["1.weight"].equal(model.state_dict()["1.weight"])


def test_a_buffer_that_training_has_enlarged(tmp_path: Path) -> None:
    first = Grows()
    place = run(engine_of(tmp_path, first), 3)
    second = Grows()
    engine = engine_of(tmp_path, second)
    load.load(engine, place)
    assert len(first.seen) == 3
    assert second.seen.equal(first.seen)


def test_a_forced_argument_keeps_the_optimizers_state(tmp_path: Path) -> None:
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [Remembers(model.parameters()) for model in models]
    place = run(engine_of(tmp_path, models[0], optimizer=optimizers[0]), 3)
    engine = engine_of(tmp_path, models[1], forced=("optimizer.lr",), optimizer=optimizers[1])
    load.load(engine, place)
    states = [optimizer.state[model.weight] for optimizer, model in zip(optimizers, models, strict=True)]
    assert {*states[0]} == {*states[1]}
    assert [past.tolist() for past in states[1]["history"]] == [past.tolist() for past in states[0]["history"]]
    assert states[1]["late"].equal(states[0]["late"])
    assert optimizers[1].seen == 3
