"""A task whose loss depends on nothing but samples and parameters, some of them tied, one frozen: what test_elastic.py
trains at changing worlds."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Loss

WORDS = 24


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Its own index, and words that follow from it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *((index * step + step**2) % WORDS for step in range(1, 5))])


class NumberStream(torch.utils.data.IterableDataset[Tensor]):
    """The same as a stream of four shards of unequal length."""

    def __init__(self, count: int) -> None:
        self.numbers = [
            list(range(count)[bounds]) for bounds in (slice(30), slice(30, 37), slice(37, 60), slice(60, None))
        ]
        self.position = self.start = 0

    @property
    def num_shards(self) -> int:
        return len(self.numbers)

    def shard(self, num_shards: int, index: int) -> NumberStream:
        part = copy.copy(self)
        part.numbers = self.numbers[index::num_shards]
        return part

    def __iter__(self) -> Iterator[Tensor]:
        numbers = list(itertools.chain(*self.numbers))
        for position in range(self.start, len(numbers)):
            self.position = position + 1
            yield Numbers(len(numbers))[numbers[position]]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


class Model(nn.Module):
    def __init__(self, width: int, extra: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.layers = nn.ModuleList([nn.Linear(12, width), nn.Linear(width, 12)])
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.Linear(12, 12) if extra else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.extra(x + self.frozen(x)))


class Words:
    def __init__(self, samples: int = 90, width: int = 20, extra: bool = False, streams: bool = False) -> None:
        self.samples, self.width, self.extra, self.streams = samples, width, extra, streams

    def model(self) -> nn.Module:
        return Model(self.width, self.extra)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return list(model.layers)

    def train_data(self) -> Any:
        return NumberStream(self.samples) if self.streams else Numbers(self.samples)

    def eval_data(self) -> None:
        return None

    def loss(self, model: Any, batch: Tensor) -> Loss:
        words = batch[:, 1:]
        guess = model(words[:, :-1]).float()
        total = nn.functional.cross_entropy(guess.flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
        return Loss(total=total, items=words[:, 1:].numel())
