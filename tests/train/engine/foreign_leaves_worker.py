"""Losses that depend on more than the model's parameters, run by test_loss_watches.py.

Prints one JSON object from rank 0: by strategy and case, the message; empty if all windows were applied.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher import Engine, Loss, make_plan
from launcher.errors import LauncherError
from tests.infra.workers import leave_group, print_on_rank_0

WIDTH = 6
GLOBAL_SCALE = nn.Parameter(torch.ones(1))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return 2 * gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.plain = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = checkpoint(block, Double.apply(x), use_reentrant=False).tanh()  # pyright: ignore
        return x * self.plain[0]


class Task:
    """Has a loss of the model's outputs alone, and what the cases below need."""

    def __init__(self) -> None:
        self.log_var = nn.Parameter(torch.zeros(1))
        self.scales = {"one": torch.ones(WIDTH, requires_grad=True)}
        self.criterion = nn.Linear(WIDTH, WIDTH)
        self.data = torch.randn(8, WIDTH, requires_grad=True)
        self.critic: Any = None

    def model(self) -> nn.Module:
        return Net()

    def loss(self, model: Any, x: Tensor) -> Loss:
        return Loss(self.total(model, x), len(x))

    def total(self, model: Any, x: Tensor) -> Tensor:
        return model(x).square().sum()


class Weighted(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return super().total(model, x) * self.log_var.exp().sum()


class Criterion(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return self.criterion(model(x)).square().sum()


class NoParameter(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return (model(x) * self.scales["one"]).square().sum()


class OfTheModel(Task):
    def model(self) -> nn.Module:
        model = super().model()
        model.plain = [torch.ones(WIDTH, requires_grad=True)]  # pyright: ignore[reportAttributeAccessIssue]
        return model


class Global(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return super().total(model, x) * GLOBAL_SCALE.sum()


class FrozenCriterion(Criterion):
    def __init__(self) -> None:
        super().__init__()
        self.criterion.requires_grad_(False)


class Penalty(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        total = super().total(model, x)
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return total + slope.square().sum()


class Adversarial(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        self.delta = nn.Parameter(torch.zeros_like(x))  # another one in each micro-batch
        return super().total(model, x + self.delta)


class Critic(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return functional.softplus(self.critic.model(model(x))).sum()


REFUSED = {
    "weighted": Weighted, "criterion": Criterion, "no parameter": NoParameter, "of the model": OfTheModel,
    "global": Global,
}  # fmt: skip
ALLOWED = {
    "plain": Task, "frozen": FrozenCriterion, "penalty": Penalty, "adversarial": Adversarial, "critic": Critic,
}  # fmt: skip
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "bf16": ["strategy=fsdp", "precision=bf16", "strategy.sync=gather_once"],
}


def engine_of(task: Task, settings: list[str], *, owner: object) -> Engine:
    plan = make_plan(
        ["precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "batch.micro_size=2",
         "train.steps=2", "cluster.device=cpu", "optimizer=sgd", "schedule=constant", "schedule.warmup_steps=0",
         "train.shuffle=false", *settings],
        samples=8,
    )  # fmt: skip
    return Engine(task.model(), lambda parameters: torch.optim.SGD(parameters, 0.01), plan, owner=owner)


def message(kind: type[Task], settings: list[str], *, owner: bool = True) -> str:
    task = kind()
    engine = engine_of(task, settings, owner=task if owner else None)
    if kind is Critic:
        task.critic = engine_of(Task(), settings, owner=None)
    try:
        for window in engine.windows(list(task.data) if kind is Penalty else list(task.data.detach())):
            for batch in window:
                engine.backward(task.loss(engine.model, batch))
            engine.step()
    except LauncherError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    results = {
        f"{strategy} {case}": message(kind, settings)
        for number, (strategy, settings) in enumerate(STRATEGIES.items())
        for place, (case, kind) in enumerate((REFUSED | ALLOWED).items())
        if (kind is not Critic or strategy == "ddp") and (sys.argv[1] == "all" or (number + place) % 3 == 0)
    }
    results["own loop"] = message(Weighted, STRATEGIES["ddp"], owner=False)
    print_on_rank_0(results)
    leave_group()


main()
