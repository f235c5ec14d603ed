"""Models whose bytes are hard to predict: adapters, conversions, loaded weights, frozen and shared parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import launcher

WIDTH, CLASSES = 10, 3


class Block(nn.Module):
    """``up`` has 7 rows, which no group of ranks shards evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Adapter(nn.Module):
    """A trained product of two small matrices beside a frozen layer, converted as adapter libraries do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        for layer in (self.down, self.up):
            layer.to(base.weight.device, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def weights() -> dict[str, Tensor]:
    """A state dict as a file reader makes it: from bytes, not from torch's factory functions."""
    shapes = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    return {name: torch.frombuffer(bytearray(4 * size.numel()), dtype=torch.float32).view(size) for name, size in
            shapes.items()}  # fmt: skip


def adapters() -> nn.Module:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapter(block.up), Adapter(block.down)
    return model


def last_block_of_loaded() -> nn.Module:
    model = Net()
    model.load_state_dict(weights(), assign=True)
    model.requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    model.head = nn.Linear(WIDTH, CLASSES)
    return model


def loaded() -> nn.Module:
    model = Net()
    model.load_state_dict(weights())
    return model


def converted() -> nn.Module:
    return Net().to(torch.float64).to(torch.float32)


def narrow() -> nn.Module:
    """Trained parameters in bf16 become fp32 (precision.parameters)."""
    return Net().to(torch.bfloat16)


def narrow_base() -> nn.Module:
    model = Net().to(torch.bfloat16)
    model.blocks[:2].requires_grad_(False)
    return model


class Distilled(nn.Module):
    """A teacher that runs without a graph, and so is gathered once a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(2), copy.deepcopy(loaded()).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x) - aim


def shared() -> nn.Module:
    """Two blocks have one layer in common, and the first layer serves as a part of a third one."""
    model = Net(4)
    model.blocks[1].up = model.blocks[0].up
    model.blocks[2].up.weight = nn.Parameter(model.blocks[2].up.weight.detach().clone())
    model.blocks[3].up.weight = model.blocks[2].up.weight
    return model


def needs_values() -> nn.Module:
    model = Net()
    with torch.no_grad():
        model.first.weight.div_(float(torch.linalg.matrix_norm(model.first.weight, 2)))
    return model


def convolutions() -> nn.Module:
    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU())

    blocks = nn.Sequential(block(5), block(5), block(5))
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 5)), block(1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES)
    )


class Recurrent(nn.Module):
    """An LSTM keeps a list of its parameters beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, CLASSES)
        self.cells.load_state_dict({name: tensor.clone() for name, tensor in self.cells.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.view(len(x), 5, 2))[0][:, -1])


MODELS = {
    make.__name__: make
    for make in (
        adapters, last_block_of_loaded, loaded, converted, narrow, narrow_base, Distilled, shared, needs_values,
        convolutions, Recurrent,
    )
}  # fmt: skip


class Task:
    """``loss_needs_values``: a mask whose number of items only real tensors have."""

    def __init__(self, model: str, loss_needs_values: bool = False) -> None:
        self._model, self._loss_needs_values = model, loss_needs_values

    def model(self) -> nn.Module:
        return MODELS[self._model]()

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(
            torch.randn(64, WIDTH, generator=generator), torch.randint(CLASSES, (64,), generator=generator)
        )

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> launcher.Loss:
        x, y = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        if self._loss_needs_values:
            losses = losses[y >= 0]
            return launcher.Loss(total=losses.sum(), items=int((y >= 0).sum()))
        return launcher.Loss(total=losses.sum(), items=len(y))


class Wide:
    """Few large layers, each larger than a bucket of DDP; or convolutions."""

    shard_units = None

    def __init__(self, kind: str = "mlp", width: int = 3000) -> None:
        self.kind, self.width = kind, width

    def model(self) -> nn.Module:
        if self.kind == "mlp":
            layers = [nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 10))
        blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(32 * 256, 10))

    def train_data(self) -> list[Tensor]:
        shape = (64,) if self.kind == "mlp" else (3, 16, 16)
        return [torch.zeros(shape) for _ in range(64)]

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Tensor) -> launcher.Loss:
        return launcher.Loss(total=model(batch).square().sum(), items=len(batch))
