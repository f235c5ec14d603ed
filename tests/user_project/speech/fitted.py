"""A task in fp64 whose model starts anywhere: two inputs, weighted items, data in the order in which it is listed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from launcher import Loss

WIDTH = 8


class Samples(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator)
        self.wanted = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
        self.weights = torch.rand(count, dtype=torch.float64, generator=generator) + 0.1

    def __len__(self):
        return len(self.wanted)

    def __getitem__(self, index):
        return self.first[index], self.second[index], self.wanted[index], self.weights[index]


class Net(nn.Module):
    """Four matrices of one size; ``moving`` is a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(4))
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "little"))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.3, generator=generator)
        self.register_buffer("moving", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, first, second):
        if self.training:
            self.moving.mul_(0.9).add_(first.detach().mean(0), alpha=0.1)
        hidden = torch.tanh(self.layers[0](first) + self.layers[1](second))
        return self.layers[3](torch.tanh(self.layers[2](hidden)))


class Fit:
    def __init__(self, samples=96, buffer=False, pause_s=0.0):
        self.samples, self.buffer, self.pause_s = samples, buffer, pause_s

    def model(self):
        model = Net()
        if not self.buffer:
            del model.moving
            model.moving = torch.zeros(WIDTH, dtype=torch.float64)
        return model

    def shard_units(self, model):
        return [model.layers[2]]

    def train_data(self):
        return Samples(self.samples)

    def loss(self, model, batch):
        time.sleep(self.pause_s)
        first, second, wanted, weights = batch
        error = (model(first, second) - wanted).square().mean(1)
        return Loss((weights * error).sum(), weights.sum())


class Even(Fit):
    """All items have the same weight, and the model always starts with the same values."""

    def model(self):
        model = super().model()
        for layer in model.layers:
            nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(5))
        return model

    def loss(self, model, batch):
        first, second, wanted, _ = batch
        error = (model(first, second) - wanted).square().mean(1)
        return Loss(error.sum(), len(error))


class Odd(Fit):
    """Shapes that few numbers of ranks divide, biases, a layer that is not trained, and any format."""

    def __init__(self, samples=96, dtype="float64"):
        super().__init__(samples)
        self.dtype = getattr(torch, dtype)

    def model(self):
        model = super().model()
        sizes = [(WIDTH, 5), (WIDTH, 5), (5, 7), (7, WIDTH)]
        model.layers = nn.ModuleList(nn.Linear(*each, dtype=self.dtype) for each in sizes)
        model.layers[1].requires_grad_(False)
        return model

    def loss(self, model, batch):
        first, second, wanted, weights = (each.to(self.dtype) for each in batch)
        error = (model(first, second) - wanted).square().mean(1)
        return Loss((weights * error).sum().double(), weights.sum().double())


class Different(Fit):
    """Differs in what a file ``different`` names, on all ranks or on the one named there: samples and order as in a
    directory whose files are not sorted."""

    def differs_in(self, what):
        file = Path("different")
        return file.exists() and file.read_text() in (what, f"{what} on rank {os.environ.get('RANK')}")

    def model(self):
        model = super().model()
        for layer in model.layers:  # the first site may be far ahead, and has no first values for others any more
            nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(5))
        if self.differs_in("order of parameters"):
            model.layers = nn.ModuleDict({str(number): model.layers[number] for number in (1, 0, 2, 3)})
            model.forward = lambda first, second: Net.forward(model, first, second)
        model.get_parameter(f"layers.{int(self.differs_in('trained'))}.weight").requires_grad_(False)
        return model

    def train_data(self):
        data = super().train_data()
        if self.differs_in("samples"):
            data.wanted = data.wanted.flip(0)
        return data

    def order(self, epoch, seed):  # noqa: ARG002 (the launcher passes them)
        order = torch.arange(self.samples)
        return order.flip(0) if self.differs_in("order") else order

    def eval_data(self):
        return {"other" if self.differs_in("held-out data") else "one": Samples(16)}


class Freezer:
    """Callback that freezes a layer after a step, and trains it again after a later one."""

    def __init__(self, after, until=None):
        self.after, self.until = after, until

    def on_step(self, engine, result):
        if result.step == self.after:
            engine.freeze("layers.1")
        if result.step == self.until:
            engine.unfreeze("layers.1")
