"""A task on which every trace that a calibration leaves would show: trained by test_calibration.py."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher import Loss

SAMPLES, WIDTH = 80, 20


class Model(nn.Module):
    """Uses its parameters in another order than it defines them, in several buckets; caches a table on first use.

    Args:
        reads: read the dtype of a unit's weight outside of the unit.
    """

    calls: Tensor
    table: Tensor

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("calls", torch.zeros(()))
        self.late = nn.Linear(WIDTH, 3)
        self.early = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        if self.training:
            self.calls = self.calls + 1
        if self.reads:  # outside of the unit's forward pass: there, it is gathered in some passes only
            x = x.to(self.middle[0].weight.dtype)
        x = self.early(x * self.table) * random.uniform(0.9, 1.1)
        return self.late(self.middle(x)) * (1 + 0.01 * self.calls)


class Traced:
    """Its loss depends on its attributes, and changes them."""

    def __init__(self, reads: bool = False) -> None:
        self.reads = reads
        self.calls = 0
        self.recent: list[float] = []
        self.state = {"mean": torch.zeros(2), "noise": np.random.default_rng(5)}
        self.generator = torch.Generator().manual_seed(7)
        self.python = random.Random(9)

    def model(self) -> nn.Module:
        return Model(self.reads)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model.middle, model.early]

    def train_data(self) -> Any:
        return Augmented()

    def eval_data(self) -> None:
        return None

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Loss:
        inputs = batch.pop("inputs")  # a batch may be used up
        inputs += 0.01 * float(np.random.rand())
        self.calls += 1
        drawn = float(torch.rand((), generator=self.generator)) + self.python.random() + self.state["noise"].random()
        self.recent = [*self.recent[-3:], drawn]
        self.state["mean"].mul_(0.9).add_(0.01 * drawn)
        target = batch["target"] * (1 + 0.01 * self.calls) + self.state["mean"].sum() + 0.01 * sum(self.recent)
        return Loss(total=(model(inputs).float() - target).square().sum(), items=len(inputs))


class Augmented(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.full((WIDTH,), index / SAMPLES) + 0.1 * torch.randn(WIDTH)
        return {"inputs": inputs * random.uniform(0.5, 2.0), "target": torch.randn(3)}
