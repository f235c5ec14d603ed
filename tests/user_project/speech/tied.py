"""A model with a tied parameter, a frozen one, and buffers of each kind."""

from __future__ import annotations

import torch
from torch import nn


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
