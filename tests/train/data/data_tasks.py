"""Tasks whose data is built from random numbers; trained by data_worker.py. ``MADE``: those of this process."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from launcher import Loss
from launcher.plan.run_plan import TaskPlan
from launcher.train.world import World
from tests.helpers import make_plan

SAMPLES, TRAINED = 80, 72
MADE: list[Any] = []


def task_plan(name: str, params: dict[str, int]) -> TaskPlan:
    samples = None if "Stream" in name or name == "Sharded" else TRAINED
    return dataclasses.replace(make_plan(samples=samples).task, target=f"{__name__}.{name}", params=params)


def seen() -> dict[str, Any]:
    return {"built": MADE[-1].built, **MADE[-1].seen}


def rank() -> int:
    return World.here().rank


class Numbers(Dataset[Tensor]):
    """Sample n is n, and something drawn by a generator that is nobody's."""

    def __init__(self, count: int = SAMPLES, *, noise: bool = False) -> None:
        self.count, self.noise = count, noise
        self.rng = np.random.default_rng()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), self.rng.random() if self.noise else 0.0])


class Split:
    """Both halves of a plain random split, made where they are asked for."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        MADE.append(self)
        self.built: list[str] = []
        self.seen: dict[str, list[float]] = {"train": [], "eval": []}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.Dropout(0.5), nn.Linear(self.width, 1))

    def parts(self) -> list[Any]:
        return random_split(Numbers(), [TRAINED, SAMPLES - TRAINED])

    def train_data(self) -> Any:
        self.built.append("train")
        return self.parts()[0]

    def eval_data(self) -> Any:
        self.built.append("eval")
        return self.parts()[1]

    def loss(self, model: Any, batch: Tensor) -> Loss:
        self.seen["train" if torch.is_grad_enabled() else "eval"] += batch[:, 0].tolist()
        return Loss(total=model(batch / SAMPLES).square().sum(), items=len(batch))


class Shuffled(Split):
    def parts(self) -> list[Any]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return [Subset(Numbers(), order[:TRAINED]), Subset(Numbers(), order[TRAINED:])]


class InTheConstructor(Split):
    def __init__(self, width: int = 3) -> None:
        super().__init__(width)
        order = np.random.permutation(SAMPLES).tolist()
        self.kept = [Subset(Numbers(), order[:TRAINED]), Subset(Numbers(), order[TRAINED:])]

    def parts(self) -> list[Any]:
        return self.kept


class Loaded(Split):
    """DataLoaders of the split's parts, whose samples need their collate_fn."""

    def parts(self) -> list[Any]:
        packed = [Packed(part) for part in super().parts()]
        return [DataLoader(part, 4, shuffle=True, collate_fn=unpack, drop_last=True) for part in packed]


class Packed(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(value=self.data[index])


def unpack(samples: list[Any]) -> Tensor:
    return torch.stack([sample.value for sample in samples])


class LoadedInVain(Split):
    """``how``: a DataLoader of held-out data that cannot be taken apart."""

    def __init__(self, how: str = "batches") -> None:
        super().__init__()
        self.how = how

    def eval_data(self) -> Any:
        data = Numbers()
        half: list[int] = list(range(40))
        match self.how:
            case "batches":
                return DataLoader(data, batch_size=None)
            case "batch_sampler":
                return DataLoader(data, batch_sampler=[[0, 1], [2]])
            case "subset":
                return DataLoader(data, 4, sampler=SubsetRandomSampler(half))
            case "weights":
                return DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
            case _:
                return DataLoader(data, 4, collate_fn=unpack)

    def train_data(self) -> Any:
        return DataLoader(Numbers(), 4)


class OfSomeLength(Split):
    def train_data(self) -> Any:
        return Numbers(random.randrange(1000, 100_000))


class Augmented(Split):
    """Random numbers of no known generator in each sample: it is another one each time, and no fault."""

    def parts(self) -> list[Any]:
        return random_split(Numbers(noise=True), [TRAINED, SAMPLES - TRAINED])


class Wrapped(Packed):
    """Much of what a sample may be, alike on all ranks but for rounding, order of sets and places on a disk."""

    def __getitem__(self, index: int) -> Any:
        number = self.data[index]
        words = {f"{word}{int(number[0])}" for word in ("one", "two", "three", "four")}
        image = torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)
        image[0, 1, 3] += rank()  # decoded by another library
        rounding = 1 + 5e-7 * rank()
        return {
            "x": number * rounding, "words": words, "file": f"/scratch/{rank()}/file", "image": image,
            "array": np.array([number[0].item(), 2.0]) * rounding, "label": (3, "three", None, 0.1 * rounding),
            "object": object(),
        }  # fmt: skip


class OfAllKinds(Split):
    def collate(self, samples: list[Any]) -> Tensor:
        return torch.stack([sample["x"] for sample in samples])

    def parts(self) -> list[Any]:
        return [Wrapped(part) for part in super().parts()]


class OtherSplit(Split):
    def parts(self) -> list[Any]:
        return random_split(Numbers(), [TRAINED, 8], torch.Generator().manual_seed(rank()))

    def eval_data(self) -> Any:
        return None


class OtherHeldOut(OtherSplit):
    def train_data(self) -> Any:
        return Numbers(TRAINED)

    def eval_data(self) -> Any:
        return self.parts()[1]


class OtherLabels(Split):
    def parts(self) -> list[Any]:
        labels = "ab" if rank() else "ac"
        data: Any = [(float(n), labels[n % 2]) for n in range(SAMPLES)]
        return [data[:TRAINED], data[TRAINED:]]


class Longer(Split):
    def train_data(self) -> Any:
        return Numbers(TRAINED + rank())


class NotHeldOutEverywhere(Split):
    def eval_data(self) -> Any:
        return None if rank() else Numbers(8)


class TwinData(Split):
    """Synthetic data of one seed: the held-out samples are the first ones trained on."""

    def parts(self) -> list[Any]:
        drawn = list(torch.randn(TRAINED, 2))
        return [drawn, drawn[:8]]


class Stream(IterableDataset[Tensor]):
    def __init__(self, generator: random.Random | None = None, *, sharded: bool = False) -> None:
        self.generator, self.sharded = generator, sharded

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(rank(), TRAINED, 2) if self.sharded else range(TRAINED))
        (self.generator or random).shuffle(order)
        yield from (torch.tensor([float(n), 0.0]) for n in order)


class Streamed(Split):
    def train_data(self) -> Any:
        return Stream()


class Sharded(Split):
    def train_data(self) -> Any:
        return Stream(sharded=True)


class OtherStream(Split):
    def train_data(self) -> Any:
        return Stream(random.Random(rank()))


class Files(IterableDataset[Tensor]):
    """The samples in files of equal size, which are its shards."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(n), 0.0]) for file in self.files for n in file)


class StreamOfFiles(Split):
    def files(self) -> list[list[int]]:
        return [list(range(TRAINED))[number::8] for number in range(8)]

    def train_data(self) -> Any:
        return Files(self.files())


class StreamOfFewerFiles(StreamOfFiles):
    def files(self) -> list[list[int]]:
        return super().files()[rank() :]


class StreamOfUnsortedFiles(StreamOfFiles):
    """The order of os.listdir, which is another one on each host."""

    def files(self) -> list[list[int]]:
        return super().files()[:: -1 if rank() else 1]
