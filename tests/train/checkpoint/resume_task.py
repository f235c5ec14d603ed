"""A task on which everything random or remembered shows: trained by test_resume.py, whole and in pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher import Loss
from tests.train.checkpoint import stateful_optimizers


def augmented(sample: Tensor) -> Tensor:
    return sample * random.uniform(0.5, 2.0) + 0.1 * torch.randn(4, 6) + float(np.random.normal())


class Data(torch.utils.data.Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.noise = torch.randn(4)  # drawn while the data is built

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return augmented(torch.full((4, 6), index / self.count)) + 1e-3 * self.noise.reshape(4, 1)


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """Shuffled within a buffer, and other in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        for index in range(self.count):
            buffer.append(augmented(torch.full((4, 6), index / self.count + self.epoch)))
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer


class Model(nn.Module):
    calls: Tensor

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.layers = nn.Sequential(
            nn.Conv1d(4, 24, 1), nn.BatchNorm1d(24) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(24 * 6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layers(x) * (1 + 0.01 * self.calls)


class Remembering(Model):
    """A model whose extra state has parts, some of which a new one does not have."""

    def __init__(self, norm: bool) -> None:
        super().__init__(norm)
        self.memory: dict[str, Any] = {"calls": 0, "sizes": [0, 0], "none": {}, "nested": [{"a": {}}]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.memory

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.memory = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.memory["calls"] += 1
            self.memory["sizes"].append(len(x))
            assert (self.memory["none"], self.memory["nested"]) == ({}, [{"a": {}}])
            self.memory["by name"] = {"last": torch.full((2,), self.memory["calls"] / 100)}
        last = self.memory["by name"]["last"].sum() if "by name" in self.memory else 0.0
        return super().forward(x) * (1 + last + 0.01 * len(self.memory["sizes"]))


class Noisy:
    def __init__(
        self, samples: int = 90, streams: bool = False, norm: bool = True, remembers: bool = False,
        optimizer: str | None = None,
    ) -> None:  # fmt: skip
        self.samples, self.streams, self.norm = samples, streams, norm
        if optimizer is not None:
            kind = getattr(stateful_optimizers, optimizer)
            self.optimizer = lambda model: kind(model.parameters())
        self.kind = Remembering if remembers else Model

    def model(self) -> nn.Module:
        return self.kind(self.norm)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model.layers[5], model.layers[7]]

    def train_data(self) -> Any:
        return Stream(self.samples) if self.streams else Data(self.samples)

    def eval_data(self) -> Any:
        return [torch.full((4, 6), float(n)) for n in range(9)]

    def loss(self, model: Any, batch: Tensor) -> Loss:
        total = ((model(batch).float() - random.random() - float(np.random.rand())) ** 2).sum()
        return Loss(total=total, items=len(batch))
