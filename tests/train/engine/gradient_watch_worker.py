"""Losses and hooks that change gradients or parameters themselves, run by test_loss_watches.py.

Prints one JSON object from rank 0: by strategy and case, the message; empty if all windows were applied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.errors import LauncherError
from tests.infra.workers import leave_group, print_on_rank_0

WIDTH = 6
Total = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, *, by_frequency: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, WIDTH, scale_grad_by_freq=by_frequency)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x[:, 0] > 0).long())
        for block in self.body:
            x = block(x).tanh()
        return self.head(x)


def plain(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def own_backward(model: Any, x: Tensor) -> Tensor:
    plain(model, x / 2).backward()
    return plain(model, x)


def zeroed(model: Any, x: Tensor) -> Tensor:
    attacked = x.clone().requires_grad_()
    plain(model, attacked).backward()
    assert attacked.grad is not None
    model.zero_grad()
    return plain(model, x + attacked.grad.sign() / 10)


def attacked(model: Any, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(plain(model, inputs), inputs)
    return plain(model, x + slope.sign() / 10)


def penalty(model: Any, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    total = plain(model, inputs)
    (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
    return total + slope.square().sum()


def several_passes(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return functional.mse_loss(model(x + 1), target, reduction="sum") + plain(model, x)


LOSSES: dict[str, Total] = {
    "own backward": own_backward, "zeroed": zeroed, "plain": plain, "attacked": attacked, "penalty": penalty,
    "several passes": several_passes, "steps in backward": plain, "by frequency": plain,
}  # fmt: skip
STRATEGIES = {
    "ddp every": ["strategy=ddp", "strategy.sync=every"],
    "ddp boundary": ["strategy=ddp", "strategy.sync=boundary"],
    "ddp compressed": ["strategy=ddp", "strategy.sync=every", "strategy.compress=bf16"],
    "fsdp every": ["strategy=fsdp", "strategy.sync=every"],
    "fsdp boundary": ["strategy=fsdp", "strategy.sync=boundary"],
    "fsdp gather_once": ["strategy=fsdp", "strategy.sync=gather_once"],
    "fsdp bf16": ["strategy=fsdp", "strategy.sync=boundary", "precision=bf16"],
}


def message(name: str, settings: list[str]) -> str:
    plan = make_plan(
        ["precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "batch.micro_size=2",
         "train.steps=3", "cluster.device=cpu", "schedule=constant", "schedule.warmup_steps=0", *settings],
        samples=8,
    )  # fmt: skip

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters = [*parameters]
        if name == "steps in backward":
            last = torch.optim.SGD(parameters[-1:], 0.01)
            parameters[-1].register_post_accumulate_grad_hook(lambda _: last.step() and None)
        return torch.optim.SGD(parameters, 0.01)

    try:
        engine = Engine(Net(by_frequency=name == "by frequency"), optimizer, plan)
        for window in engine.windows(list(torch.sin(torch.arange(8.0 * WIDTH)).view(8, WIDTH))):
            for batch in window:
                engine.backward(LOSSES[name](engine.model, batch), len(batch))
            engine.step()
    except LauncherError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    print_on_rank_0({
        f"{strategy}: {name}": message(name, settings)
        for number, (strategy, settings) in enumerate(STRATEGIES.items()) for place, name in enumerate(LOSSES)
        if sys.argv[1] == "all" or (number + place) % 3 == 0
    })  # fmt: skip
    leave_group()


main()
