"""Tasks with held-out data of several kinds, trained by test_evaluation.py; a reference evaluates them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from launcher import Loss

BUILT: list[str] = []  # data that this process has built, in order


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of uneven length with a label; number n is the same in every data set of the seed."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.count = count
        self.lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        self.data = [torch.randn(length, 6, generator=generator) for length in self.lengths]
        self.labels = [(x.sum() + 2 * torch.randn((), generator=generator) > 0).long() for x in self.data]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index], self.labels[index]


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: Sequences) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data[index] for index in range(len(self.data)))


class Scorer(nn.Module):
    """Score of a sequence: attention over its elements; dropout and a running mean show whether modes are kept."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 8), nn.Linear(6, 8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        weights = self.key(x).sum(-1).masked_fill(~mask, -1e4).softmax(-1)
        pooled = (weights.unsqueeze(-1) * self.value(x).tanh()).sum(1)
        return self.head(self.drop(pooled)).squeeze(-1)


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([sample for sample, _ in samples], batch_first=True)
    lengths = torch.tensor([len(sample) for sample, _ in samples])
    return x, torch.arange(x.shape[1]) < lengths.unsqueeze(1), torch.stack([label for _, label in samples])


class Detector:
    """A loss over the elements of sequences. ``held_out``: which data ``eval_data`` returns."""

    def __init__(self, held_out: str = "one", samples: int = 48) -> None:
        self.held_out, self.samples = held_out, samples

    def model(self) -> nn.Module:
        return Scorer()

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model.value]

    def train_data(self) -> Dataset[Any]:
        BUILT.append("train")
        return Sequences(self.samples, 1)

    def eval_data(self) -> Any:
        BUILT.append("eval")
        near, far = Sequences(13, 2), Sequences(7, 3)
        return {
            "one": near,
            "several": {"near": near, "far": far, "stream": Streamed(Sequences(11, 4))},
            "three samples": Sequences(3, 5),
            "no item": {"near": near, "none": Sequences(0, 3)},
        }[self.held_out]

    def collate(self, samples: list[Any]) -> Any:
        return padded(samples)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        x, mask, labels = batch
        score = model(x, mask).float()
        each = functional.binary_cross_entropy_with_logits(score, labels.float(), reduction="none")
        items = mask.sum(1)  # the longer a sequence, the more it counts
        return Loss(total=(each * items).sum(), items=items.sum())
