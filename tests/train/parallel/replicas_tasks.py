"""Tasks whose evaluations fail, or could change training; trained by replicas_worker.py. ``MADE``: of this process."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Loss

MADE: list[Any] = []
fails = False


class Late(nn.Module):
    """Buffers that begin to change in the third window, each in its own way, and one that evaluations change too."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("added", "replaced", "unseen", "always"):
            self.register_buffer(name, torch.zeros(6))
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))
        self.norm = nn.BatchNorm1d(6).eval()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.training:
            self.calls += 1
            if self.calls > 4:  # two micro-batches a window
                self.norm.train()
                self.added += mean
                self.replaced = self.replaced + mean
                self.unseen.data.add_(mean)
        self.always += 0.1 * mean
        return self.layers(self.norm(x) + 0.1 * (self.added + self.replaced + self.unseen + self.always))


class Restless:
    """Everything draws random numbers."""

    def __init__(self) -> None:
        MADE.append(self)
        self.log: list[str] = []
        self.built: nn.Module | None = None

    def model(self) -> nn.Module:
        self.built = Late()
        return self.built

    def train_data(self) -> Any:
        return list(torch.randn(48, 6))

    def eval_data(self) -> Any:
        return [torch.full((6,), float(n)) for n in range(9)]

    def loss(self, model: Any, batch: Tensor) -> Loss:
        self.log.append("train" if torch.is_grad_enabled() else "eval")
        noise = random.random() + torch.rand(()).item()
        return Loss(total=(model(batch + noise) - 1).square().sum(), items=len(batch))


class FailsAtTheEnd(Restless):
    """Its evaluation fails in the second micro-batch of rank 0: what was tried before training did not."""

    def loss(self, model: Any, batch: Tensor) -> Loss:
        found = super().loss(model, batch)
        if fails and self.log[-2:] == ["eval", "eval"]:
            raise ArithmeticError("the metric")
        return found


class Broken(Restless):
    def loss(self, model: Any, batch: Tensor) -> Loss:
        found = super().loss(model, batch)
        if not torch.is_grad_enabled():
            raise ArithmeticError("the metric")
        return found
