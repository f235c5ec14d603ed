"""Small tasks of the benchmark of forecasts: a perceptron and a convolutional network on random data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from launcher import Loss

SAMPLES = 4096
CLASSES = 10


class _Random(Dataset[tuple[Tensor, int]]):
    """Random samples. Each is a tensor of its own, so that a memory tracker does not count the whole data."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        draw = np.random.default_rng(0)
        self._inputs = draw.standard_normal((SAMPLES, *shape), dtype=np.float32)
        self._labels = draw.integers(CLASSES, size=SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self._inputs[index]), int(self._labels[index])


class _Classifier:
    """Task of classifying random inputs of the shape ``shape``."""

    shape: tuple[int, ...]

    def train_data(self) -> _Random:
        return _Random(self.shape)

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, labels = batch
        return Loss(total=functional.cross_entropy(model(inputs), labels, reduction="sum"), items=len(labels))


class Mlp(_Classifier):
    """Perceptron with residual layers.

    Args:
        width: of each hidden layer.
        depth: number of hidden layers.
    """

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        self.width, self.depth = width, depth
        self.shape = (64,)

    def model(self) -> nn.Module:
        layers = [_Residual(nn.Sequential(nn.Linear(self.width, self.width), nn.GELU())) for _ in range(self.depth)]
        return nn.Sequential(nn.Linear(64, self.width), *layers, nn.Linear(self.width, CLASSES))

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, _Residual)]


class Conv(_Classifier):
    """Convolutional network with residual blocks on images of 24 x 24 pixels.

    Args:
        channels: of each block.
        depth: number of blocks.
    """

    def __init__(self, channels: int = 48, depth: int = 8) -> None:
        self.channels, self.depth = channels, depth
        self.shape = (3, 24, 24)

    def model(self) -> nn.Module:
        def block() -> nn.Module:
            return _Residual(
                nn.Sequential(
                    nn.GroupNorm(4, self.channels),
                    nn.ReLU(),
                    nn.Conv2d(self.channels, self.channels, 3, padding=1),
                )
            )

        return nn.Sequential(
            nn.Conv2d(3, self.channels, 3, stride=2, padding=1),
            *(block() for _ in range(self.depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(self.channels, CLASSES),
        )

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, _Residual)]


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(inputs)
