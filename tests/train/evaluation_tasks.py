"""Tasks with held-out data of several kinds, trained by test_evaluation.py; a reference evaluates them by hand."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import launcher
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


class Blank(Sequences):
    """Sequences without elements."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index][:0], self.labels[index]


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
            "three samples": Sequences(3, 10),
            "no item": {"near": near, "none": Blank(5, 3)},
            "no sample": {"near": near, "none": Streamed(Sequences(0, 3))},
        }[self.held_out]

    def collate(self, samples: list[Any]) -> Any:
        return padded(samples)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        x, mask, labels = batch
        score = model(x, mask).float()
        each = functional.binary_cross_entropy_with_logits(score, labels.float(), reduction="none")
        items = mask.sum(1)  # the longer a sequence, the more it counts
        return Loss(total=(each * items).sum(), items=items.sum())


class Scripted(Detector):
    """Its held-out loss and accuracy after a step are the script's, and those of other metrics.

    Where there is a file "die at N", the evaluation of step N is killed, once.
    """

    def __init__(self, script: dict[str, float | None], samples: int = 48) -> None:
        super().__init__(samples=samples)
        self.script = {int(step): float("nan") if value is None else value for step, value in script.items()}

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        now = launcher.current()
        if not now.evaluating:
            return loss
        marker = Path(f"die at {now.step}")
        if now.step in self.script and now.rank == 0 and marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        value = self.script.get(now.step, 9.0)
        if math.isnan(value):
            return Loss(total=loss.total * value, items=loss.items, metrics={"accuracy": (value, 1), "never": (0, 0)})
        count = batch[2].numel()
        metrics = {"accuracy": (value * count, count), "never": (0, 0)}
        return Loss(total=0.0 * loss.total + value * loss.items, items=loss.items, metrics=metrics)


class Ranked(Detector):
    """Metrics that are no sums. ``kind``: what ``eval_metrics`` returns."""

    def __init__(self, kind: str = "several", held_out: str = "several", samples: int = 48) -> None:
        super().__init__(held_out, samples)
        self.kind = kind

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        x, mask, labels = batch
        score = model(x, mask)
        total = functional.binary_cross_entropy_with_logits(score.float(), labels.float(), reduction="sum")
        if self.kind == "without outputs":
            return Loss(total, len(labels))
        if self.kind == "classes":  # logits of two classes, by position
            return Loss(total, len(labels), outputs=(torch.stack([-score, score], 1), labels))
        scores = {"preds": score.sigmoid(), "target": labels, "unused": x}
        return Loss(total, len(labels), metrics={"positive": (labels.sum(), len(labels))}, outputs=scores)

    def eval_metrics(self) -> Any:
        from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef
        from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryConfusionMatrix, MulticlassAccuracy
        from torchmetrics.wrappers import ClasswiseWrapper

        class Correlation(PearsonCorrCoef):
            """A metric of the user's own, whose states torchmetrics neither adds nor concatenates."""

            def update(self, preds: Tensor, target: Tensor) -> None:
                super().update(preds, target.float())

        if self.kind == "several":
            low, high = BinaryAccuracy(threshold=0.3), BinaryAccuracy(threshold=0.7)
            several = {"auroc": BinaryAUROC(), "mse": MeanSquaredError(), "corr": Correlation()}
            return MetricCollection({**several, "low": low, "high": high})
        if self.kind == "classes":
            return {"of": ClasswiseWrapper(MulticlassAccuracy(num_classes=2, average=None), labels=["no", "yes"])}
        return {
            "one": BinaryAUROC(),
            "without outputs": BinaryAUROC(),
            "vector": BinaryConfusionMatrix(),
            "twice": {"positive": BinaryAUROC()},
            "function": {"auroc": BinaryAUROC.compute},
            "of my own": SimpleNamespace(update=list, compute=list, reset=list),
            "holds one": nn.Sequential(BinaryAUROC()),
            "a name": MetricCollection({"auroc": BinaryAUROC()}, prefix="val/"),
        }[self.kind]
