"""A task whose model has a tied parameter, a frozen one, and buffers; and a callback that keeps what it starts with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import launcher
from speech.tasks import Tagger


class TiedModel(nn.Module):
    def __init__(self, width, tied):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("offset", torch.rand(5), persistent=False)
        self.head = nn.Linear(width, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        if self.training:
            self.calls += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x) + self.scale.sum() * self.offset.sum()


class Tied(Tagger):
    def __init__(self, width=16, tied=True, samples=100):
        super().__init__(width, samples)
        self.tied = tied

    def model(self):
        return TiedModel(self.width, self.tied)

    def shard_units(self, model):
        return list(model.blocks)


class Hooked(Tied):
    """Writes a file of its own."""

    def export(self, model, directory):
        torch.save({name: value.sum() for name, value in model.state_dict().items()}, directory / "sums.pt")


class Start:
    """Callback that writes the whole model before the first step to ``start.pt``."""

    def on_start(self, engine):
        state = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in (*engine.model.state_dict().items(), *engine.model.named_buffers())
        }
        if launcher.current().rank == 0:
            torch.save({name: value.clone() for name, value in state.items()}, Path("start.pt"))
