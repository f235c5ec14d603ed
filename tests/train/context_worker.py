"""A loop of a user's own that asks for its context, run by torchrun in test_context.py."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

import launcher
from launcher import Engine, make_plan


def main() -> None:
    plan = make_plan(
        ["batch.global_size=8", "batch.micro_size=2", "train.steps=3", "train.loader_workers=0"], samples=8
    )
    model = nn.Linear(1, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    seen: dict[str, Any] = {"steps": [], "between": []}
    for window in engine.windows(torch.utils.data.TensorDataset(torch.ones(8, 1))):
        for (batch,) in window:
            now = launcher.current()
            seen["steps"].append(now.step)
            now.log("last", len(seen["steps"]))
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
        seen["between"].append(launcher.current().step)
    seen |= engine.context.take_scalars()
    if engine.world.rank == 0:
        print(json.dumps(seen))


main()
