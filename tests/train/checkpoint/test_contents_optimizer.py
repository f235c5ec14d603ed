"""A save and a resume leave parameters, optimizer and random state as they are, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from launcher import Engine, make_plan
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import load, save

DATA = list(torch.sin(torch.arange(48.0)).reshape(12, 4))
STEPS = 6


class Langevin(Optimizer):
    """Without state; it adds noise that the learning rate does not scale."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad).add_(torch.randn_like(parameter), alpha=0.01)


class ThawsLate:
    def on_setup(self, engine: Engine) -> None:
        engine.freeze("^1")

    def on_step(self, engine: Engine, result: Any) -> None:
        if result.step == 3:
            engine.unfreeze("^1")


Make = Callable[[nn.Sequential], Sequence[Optimizer]]
OPTIMIZERS: dict[str, Make] = {
    "noise": lambda model: [Langevin(model.parameters())],
    "one of two has no state yet": lambda model: [
        AdamW(model[0].parameters(), 0.05),
        Adam(model[1].parameters(), 0.05),
    ],
    "rates are tensors": lambda model: [AdamW(model.parameters(), torch.tensor(0.05))],
}


def train(place: Path, make: Make, *, saves: Sequence[int] = (), resume: int = 0) -> Tensor:
    """Return the parameters after STEPS steps, from the checkpoint of step ``resume`` on."""
    plan = make_plan(
        [f"run.dir={place}", "run.name=a", "batch.global_size=4", f"train.steps={STEPS}", "cluster.device=cpu",
         "precision=fp32", "train.loader_workers=0", "schedule=cosine"], samples=len(DATA),
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    engine = Engine(model, make(model), plan, callbacks=[ThawsLate()])
    if resume:
        load.load(engine, plan.paths.checkpoint(resume))
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward((engine.model(batch) - 1).square().sum(), len(batch))
        if engine.step().step in saves:
            save.write(save.take_snapshot(engine, Fence.here(plan.paths)))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saves_and_a_resume_do_not_change_what_is_learned(tmp_path: Path, name: str) -> None:
    undisturbed = train(tmp_path / "never", OPTIMIZERS[name])
    assert train(tmp_path / "saved", OPTIMIZERS[name], saves=(1, 2, 4)).equal(undisturbed)
    for step in (2, 4):
        assert train(tmp_path / "saved", OPTIMIZERS[name], resume=step).equal(undisturbed)
