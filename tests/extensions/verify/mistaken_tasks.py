"""Tasks for `launch verify` with one mistake each, or that a setting may make wrong."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Loss
from launcher.config.schema import TrainConfig
from launcher.train.data.randomness import Permutation
from tests.extensions.verify.verify_tasks import (
    WIDTH,
    Counter,
    Padded,
    Sentences,
    Streamed,
    bag_of_words,
    token_loss,
    tokens,
)

# to be caught: arithmetic


class CoarseAlone(Padded):
    """Task whose loss is five percent larger in bf16 with a single sample."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        coarse = torch.is_autocast_enabled("cpu") and len(batch) == 1
        return Loss(total=token_loss(model, batch) * (1.05 if coarse else 1.0), items=tokens(batch))


# to be caught: the loss


class BareMean(Padded):
    def loss(self, model: Any, batch: Tensor) -> Any:
        return token_loss(model, batch, "mean")


class MeanAsSum(Padded):
    """Mean over tokens that is declared as a sum over samples."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch, "mean") * len(batch), items=len(batch))


class CountsPadding(Padded):
    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch), items=batch[:, 1:].numel())


class Contrasted(Padded):
    """Contrastive loss over the samples of one micro-batch."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        pooled = model(batch).mean(1)
        return Loss(
            total=functional.cross_entropy(pooled @ pooled.T, torch.arange(len(batch)), reduction="sum"),
            items=len(batch),
        )


# to be caught: the state


class Remembers(Padded):
    """Model with state in a plain attribute, which each micro-batch changes."""

    class Memory(nn.Module):
        state: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.state
            self.state = 0.5 * x.detach().mean((0, 1))
            return x

    def model(self) -> nn.Module:
        return bag_of_words(self.Memory())


class RemembersInTask(Padded):
    """Task with such state: the loss is weighted by the number of micro-batches so far."""

    calls = 0

    def loss(self, model: Any, batch: Tensor) -> Any:
        self.calls += 1
        return Loss(total=token_loss(model, batch) * (1 + 0.1 * self.calls), items=tokens(batch))


class RemembersInBuffer(Padded):
    class Memory(Counter):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.seen
            super().forward(x)
            return y

    def model(self) -> nn.Module:
        return bag_of_words(self.Memory())


class Normed(Padded):
    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    def model(self) -> nn.Module:
        return bag_of_words(self.Norm(WIDTH))


class Normalised:
    """A plain BatchNorm, over samples of one size."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def train_data(self) -> Any:
        return list(torch.randn(29, 6, generator=torch.Generator().manual_seed(1)))

    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=(model(batch) - batch.sum(1, keepdim=True)).square().sum(), items=len(batch))


class Noisy(Padded):
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn_like(x)

    def model(self) -> nn.Module:
        return bag_of_words(self.Noise())


class Unrepeatable(Padded):
    """Loss with random numbers that no seed determines."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch) * (1 + os.urandom(1)[0] / 256), items=tokens(batch))


class Unused(Padded):
    def model(self) -> nn.Module:
        model = bag_of_words()
        model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
        return model


class WritesRows(Padded):
    """Loss that scales an embedding by what is in its rank's samples."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        with torch.no_grad():
            model[0].weight.mul_(1 + batch.sum() / 2**14)
        return super().loss(model, batch)


# to be caught: the data


class OtherData(Padded):
    def train_data(self) -> Any:
        return Sentences(seed=int(os.environ["RANK"]))


class OtherLength(Padded):
    def train_data(self) -> Any:
        return Sentences(29 + int(os.environ["RANK"]))


class UnseededData(Padded):
    class Data(Sentences):
        def __getitem__(self, index: int) -> Tensor:
            return self.data[index].roll(os.urandom(1)[0] % 5)

    def train_data(self) -> Any:
        return self.Data()


class NotSharded(Padded):
    class Data(Streamed.Data):
        sharded = True

    def train_data(self) -> Any:
        return self.Data()


# to be refused


class Vector(Padded):
    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch, "none"), items=tokens(batch))


class NumberLoss(Padded):
    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch).item(), items=tokens(batch))  # pyright: ignore[reportArgumentType]


class Negative(Padded):
    """Negative items; with ``as_tensor`` in a tensor on the device."""

    def __init__(self, as_tensor: Any = None) -> None:
        self.as_tensor = as_tensor

    def loss(self, model: Any, batch: Tensor) -> Any:
        items = torch.tensor(-len(batch)) if self.as_tensor else -len(batch)
        return Loss(total=token_loss(model, batch), items=items)


class ItemsWithGradient(Padded):
    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch), items=model(batch[:, :-1]).exp().sum())


class NotEvaluated(Padded):
    """Task that trains, and fails at its first evaluation."""

    def eval_data(self) -> Any:
        return Sentences(5)

    def loss(self, model: Any, batch: Tensor) -> Any:
        if not torch.is_grad_enabled():
            raise ValueError("no labels in the held-out data")
        return super().loss(model, batch)


class AllPadding(Padded):
    """Samples without items."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        return torch.zeros_like(super().collate(samples))


class SometimesPadding(Padded):
    """Data whose first window, of 12 samples, has no items."""

    def train_data(self) -> Any:
        data = Sentences()
        for index in Permutation(len(data), TrainConfig().seed, 0).take(0, 12):
            data.data[index] = torch.zeros_like(data.data[index])
        return data


class Greedy(Padded):
    """Task that runs out of memory with more than five samples at once."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        if len(batch) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().loss(model, batch)
