"""Tasks with lengths of their samples, and with orders of their own: text of uneven length, and a small model."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from launcher import Loss, Packing
from launcher.plan.run_plan import TaskPlan
from launcher.rundir.files import value_from_json
from launcher.train.inspection.task_probe import probe
from launcher.train.world import World
from tests.helpers import inspection_of

SAMPLES, VOCABULARY = 90, 13
SEEN: list[list[int]] = []  # lengths of the samples of each micro-batch that was trained on in this process


def task_plan(name: str, params: dict[str, Any]) -> TaskPlan:
    fields = probe(inspection_of(f"{__name__}.{name}", **params))
    SEEN.clear()
    Texts.reads = 0
    return dataclasses.replace(value_from_json(TaskPlan, fields), batch_norms=0)


def seen() -> dict[str, Any]:
    return {"seen": [*SEEN], "reads": Texts.reads}


def text_of(index: int) -> Tensor:
    """A sample's tokens, 2 to 60 of them."""
    generator = torch.Generator().manual_seed(index)
    length = 2 + int(58 * torch.rand((), generator=generator) ** 3)
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


class Texts(Dataset[Tensor]):
    reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        Texts.reads += 1
        return text_of(index)


def loss_sum(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    targets = batch[:, 1:].flatten()
    logits = model(batch[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum"), (targets != 0).sum()


class Plain:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))

    def train_data(self) -> Any:
        return Texts()

    def eval_data(self) -> Any:
        return None

    def collate(self, samples: list[Tensor]) -> Tensor:
        SEEN.append([len(sample) for sample in samples])
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: Any, batch: Tensor) -> Loss:
        return Loss(*loss_sum(model, batch))


class WithLengths(Plain):
    def lengths(self, data: Any) -> list[int]:
        return [len(text_of(index)) for index in range(len(data))]


class WithLength(Plain):
    def length(self, sample: Tensor) -> int:
        return len(sample)


class WithColumn(Plain):
    """Columns as those of Hugging Face's datasets."""

    class Columns(Texts):
        column_names = ("text", "length")

        def __getitem__(self, index: Any) -> Any:
            if index == "length":
                return [len(text_of(number)) for number in range(SAMPLES)]
            return text_of(index)

    def train_data(self) -> Any:
        return self.Columns()


class Packed(WithLengths):
    """Rows of 64 tokens."""

    collate = Packing(64)  # pyright: ignore[reportAssignmentType]

    def loss(self, model: Any, batch: Any) -> Loss:
        logits, targets = model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()
        return Loss(functional.cross_entropy(logits, targets, reduction="sum"), batch["items"])


class TooFewLengths(Plain):
    def lengths(self, data: Any) -> list[int]:  # noqa: ARG002
        return [1]


class LengthsOfNothing(Plain):
    def lengths(self) -> list[int]:
        return [1] * SAMPLES


class LengthsOfRank(WithLengths):
    def lengths(self, data: Any) -> list[int]:
        return [length + World.here().rank for length in super().lengths(data)]


class LengthIsText(Plain):
    def length(self, sample: Tensor) -> str:
        return f"{len(sample)} tokens"


class Weighted(Plain):
    """Samples drawn with replacement, twice as often with an odd index; not as many as there are."""

    def order(self, epoch: int, seed: int) -> Any:  # noqa: ARG002
        return WeightedRandomSampler([1.0 + index % 2 for index in range(SAMPLES)], 70)


class WeightedAndBalanced(Weighted, WithLengths):
    """Both."""


class Loaded(Weighted):
    """The DataLoader that the script had, whose sampler the method replaces."""

    def train_data(self) -> Any:
        return DataLoader(Texts(), 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, 70), collate_fn=list)


class OrderOfRank(Plain):
    def order(self, epoch: int, seed: int) -> list[int]:
        indices = list(range(SAMPLES))
        random.Random(f"{seed} {epoch} {World.here().rank}").shuffle(indices)
        return indices


class WrongOrder(Plain):
    """``how``: what the method returns instead of indices."""

    def __init__(self, how: str = "too large") -> None:
        self.how = how

    def order(self, epoch: int, seed: int) -> Any:  # noqa: ARG002
        match self.how:
            case "too large":
                return [0, 5, SAMPLES, 1]
            case "negative":
                return [0, -1]
            case "fractions":
                return [0.0, 1.0]
            case "names":
                return ["one", "two"]
            case "empty":
                return []
            case "nothing":
                return None
            case "another each time":
                return np.random.default_rng().permutation(SAMPLES)
            case _:
                return list(range(SAMPLES - epoch))


class Streamed(Plain):
    """The texts as a stream, whose state is the position in it."""

    class Stream(IterableDataset[Tensor]):
        position = start = 0

        def __iter__(self) -> Any:
            for index in range(self.start, SAMPLES):
                self.position = index + 1
                yield Texts()[index]

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start = state["position"]

    def train_data(self) -> Any:
        return self.Stream()


class OrderedStream(Weighted):
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return map(text_of, range(SAMPLES))

    def train_data(self) -> Any:
        return self.Stream()
