"""Tasks whose windows are measured, each with something that the bundled tasks do not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from launcher import Loss

WIDTH = 8


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, WIDTH, generator=generator), torch.randn(count, 1, generator=generator))


class Plain:
    """A random part of few samples. ``rows``: file that says how many, if it is given."""

    def __init__(self, rows: str = "") -> None:
        self.count = 30
        if rows:
            with open(rows) as file:  # noqa: PTH123
                self.count = int(file.read())

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, 1))

    def train_data(self) -> Any:
        return random_split(samples(self.count), [self.count - 5, 5])[0]

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, aims = batch
        return Loss(F.mse_loss(model(inputs), aims, reduction="sum"), len(aims))


class TwoInputs(nn.Module):
    """Model of two inputs with a frozen part, and blocks that FSDP shards."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        hidden = self.frozen(left) + right
        for block in self.blocks:
            hidden = hidden + F.relu(block(hidden))
        return self.head(hidden)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        value = torch.full((WIDTH,), index / 500)
        return {"left": value, "right": 1 - value, "aim": value[:1]}


class Several(Plain):
    """Two inputs, an optimizer of its own, and a loss of two terms that are averaged over different items."""

    def model(self) -> nn.Module:
        return TwoInputs()

    def train_data(self) -> Any:
        return Pairs()

    def optimizer(self, model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
        rest = [p for p in model.parameters() if p.requires_grad and p.ndim != 2]
        return [torch.optim.SGD(matrices, 0.01, momentum=0.9), torch.optim.AdamW(rest, 0.01)]

    def loss(self, model: Any, batch: Any) -> Any:
        out = model(batch["left"], right=batch["right"])
        few = out[:1]
        return [
            Loss(F.mse_loss(out, batch["aim"], reduction="sum"), len(out)),
            Loss(few.square().sum(), len(few), name="size"),
        ]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            number += 1
            yield torch.full((WIDTH,), number % 7 / 7), torch.ones(1)


class Stream(Plain):
    def train_data(self) -> Any:
        return Endless()


class ShortStream(Plain):
    """A stream of fewer samples than a window has."""

    def train_data(self) -> Any:
        class Few(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                yield from (samples(3)[index] for index in range(3))

        return Few()


class WindowLoss:
    """A loss of all samples of a window."""

    def model(self) -> nn.Module:
        return nn.Linear(WIDTH, 4)

    def train_data(self) -> Any:
        return Subset(samples(100), range(64))

    def outputs(self, model: Any, batch: Any) -> Tensor:
        return model(batch[0])

    def window_loss(self, outputs: Tensor) -> Loss:
        similar = F.normalize(outputs) @ F.normalize(outputs).T
        return Loss(similar.square().sum(), len(outputs))


class FailsAtSecond(Plain):
    """A forward pass that works once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("the second call fails")
        return super().loss(model, batch)


class Slow(Plain):
    """Waits long in its first forward pass, and says so in the file ``mark``."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def loss(self, model: Any, batch: Any) -> Any:
        import os
        import time
        from pathlib import Path

        Path(f"{self.mark}.{os.getpid()}").touch()
        time.sleep(600)
        return super().loss(model, batch)
