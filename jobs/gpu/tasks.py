"""Tasks of the GPU acceptance: small models whose windows a plain loop can reproduce, and tasks that misbehave."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.gpu import shared_gpu
from launcher import Loss
from launcher.extensions.hf.llama import Llama
from launcher.plan.host import shares_gpus
from launcher.train.parallel import collectives

WORDS = 61


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Reader(nn.Module):
    """Model from words [samples, length] to logits of the next word, computed from the mean of the words so far."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        so_far = torch.arange(1, words.shape[1] + 1, device=words.device)[:, None]
        x = self.words(words).cumsum(1) / so_far
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Dataset whose sample i depends only on i: word k + 1 follows from word k, and lengths differ."""

    def __init__(self, samples: int, length: int) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        words = [(7 * index + 3) % (WORDS - 1) + 1]
        while len(words) < 3 + (5 * index) % (self.length - 3):
            words.append((5 * words[-1] + index % 4) % (WORDS - 1) + 1)
        return torch.tensor(words)


class Words:
    """Next-word prediction; an item is a target word, counted on the device.

    Args:
        trouble: in training, from this rank's ``after``-th loss on: "stuck" starts a kernel that does not end, and more
            kernels than the launch queue takes; "dies" ends the process, once in the run that ``marks`` belongs to;
            "raises" has rank 0 raise with a kernel in flight, while the other ranks are stuck; "stops" has rank 1 stop
            as by kill -STOP.
        marks: directory in which a death or an error is recorded.
        megabytes: additional memory that each sample of a micro-batch needs.
        room: limit on the process's memory, in MiB.
        room_rank: the rank that has the limit; None: each.
    """

    def __init__(
        self, width: int = 32, depth: int = 2, samples: int = 240, length: int = 24, dropout: float = 0.0,
        trouble: str = "", after: int = 7, marks: str = "", megabytes: int = 0, room: int = 0,
        room_rank: int | None = None,
    ) -> None:  # fmt: skip
        self.width, self.depth, self.samples, self.length, self.dropout = width, depth, samples, length, dropout
        self.trouble, self.after, self.marks, self.megabytes, self.room = trouble, after, marks, megabytes, room
        self.room_rank, self._losses = room_rank, 0

    def model(self) -> nn.Module:
        rank = os.environ.get("RANK")
        if self.room and rank is not None and self.room_rank in (None, int(rank)):
            own = torch.cuda.current_device()
            whole = torch.cuda.get_device_properties(own).total_memory
            torch.cuda.set_per_process_memory_fraction(self.room * 2**20 / whole, own)
        return Reader(self.width, self.depth, self.dropout)

    def train_data(self) -> Sentences:
        return Sentences(self.samples, self.length)

    def eval_data(self) -> Sentences:
        return Sentences(16, self.length)

    def collate(self, samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    def flops_per_sample(self) -> float:
        """Return 6 FLOPs per linear-layer weight and word, for the longest sentence."""
        return 6.0 * self.length * (8 * self.depth * self.width**2 + self.width * WORDS)

    def loss(self, model: Any, batch: Tensor) -> Loss:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(inputs).flatten(0, 1).float()
        total = functional.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum")
        if torch.is_grad_enabled() and "RANK" in os.environ:
            self._losses += 1
            total = self._misbehave(total, batch)
        return Loss(total=total, items=(targets != 0).sum())

    def _misbehave(self, total: Tensor, batch: Tensor) -> Tensor:
        if self.megabytes:
            total = total + 0 * torch.ones(len(batch) * self.megabytes * 2**18, device=total.device).sum()
        if self._losses >= self.after and (
            self.trouble == "stuck" or (self.trouble == "raises" and os.environ["RANK"] != "0")
        ):
            if total.is_cuda:
                for _ in range(100):
                    torch.cuda._sleep(2**40)
                for _ in range(5000):
                    torch.zeros(1, device=total.device)
            else:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # blocked in C, where no signal handler runs
        if self._losses >= self.after and self.trouble == "raises":
            Path(self.marks, "raised").touch()
            if total.is_cuda:
                torch.cuda._sleep(2**32)
            raise ValueError("the trouble of this check")
        if self._losses == self.after and self.trouble == "stops" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        mark = Path(self.marks, "died")
        if self._losses >= self.after and self.trouble == "dies" and not mark.exists():
            mark.touch()
            os._exit(3)
        return total


Pair = namedtuple("Pair", ["first", "rest"])


@dataclass
class Sample:
    words: Tensor
    name: str


class Bag:
    """Object with a ``to`` method, of a type unknown to torch."""

    def __init__(self, words: Tensor) -> None:
        self.words = words

    def to(self, *arguments: Any, **options: Any) -> Bag:
        return Bag(self.words.to(*arguments, **options))


class Nested(Words):
    """Task with the same batch in every supported container; each must be on the model's device."""

    def collate(self, samples: list[Tensor]) -> Any:  # type: ignore[override]
        words = super().collate(samples)
        counted: defaultdict[str, Tensor] = defaultdict(list, {"words": words})  # type: ignore[arg-type]
        return {
            "words": words,
            "tuple": (words, [words]),
            "named": Pair(words, {"more": words}),
            "dataclass": Sample(words, "a name"),
            "counted": counted,
            "ordered": OrderedDict(words=words),
            "bag": Bag(words),
            "text": ["as it is"],
        }

    def loss(self, model: Any, batch: Any) -> Loss:
        if isinstance(batch, Tensor):  # called by the plain loop
            return super().loss(model, batch)
        places = {
            "dict": batch["words"],
            "tuple": batch["tuple"][1][0],
            "named tuple": batch["named"].rest["more"],
            "dataclass": batch["dataclass"].words,
            "defaultdict": batch["counted"]["words"],
            "OrderedDict": batch["ordered"]["words"],
            "object with to()": batch["bag"].words,
        }
        device = next(model.parameters()).device
        elsewhere = [name for name, tensor in places.items() if tensor.device != device]
        if elsewhere:
            raise RuntimeError(f"not on {device}: {', '.join(elsewhere)}")
        return super().loss(model, batch["words"])


class Reported(Words):
    """Task that writes to ``report``, in each training loss, the bytes in use on the device and the number of compiled
    frames."""

    def __init__(self, report: str = "", **others: Any) -> None:
        super().__init__(**others)
        self.report = report

    def loss(self, model: Any, batch: Tensor) -> Loss:
        loss = super().loss(model, batch)
        if "RANK" in os.environ and torch.is_grad_enabled():
            free, total = torch.cuda.mem_get_info() if batch.is_cuda else (0, 0)
            frames = torch._dynamo.utils.counters["frames"]["ok"] if "torch._dynamo" in sys.modules else 0
            with Path(self.report).open("a") as report:
                report.write(f"{total - free} {frames}\n")
        return loss


class Unevaluated(Words):
    """Task without held-out data."""

    def eval_data(self) -> None:  # type: ignore[override]
        return None


class SlowlyDrawn(Words):
    """Task whose initial values rank 0 draws again and again for ``drawing_s`` seconds."""

    def __init__(self, drawing_s: float = 0, **others: Any) -> None:
        super().__init__(**others)
        self.drawing_s = drawing_s

    def model(self) -> nn.Module:
        end, model = time.monotonic() + self.drawing_s, super().model()
        while os.environ.get("RANK") == "0" and time.monotonic() < end:
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
        return model


class Arithmetic(Words):
    """Task that writes the relative errors of a matrix product and of a convolution in fp32 to ``report``."""

    def __init__(self, report: str = "", **others: Any) -> None:
        super().__init__(**others)
        self.report = report

    def loss(self, model: Any, batch: Tensor) -> Loss:
        if "RANK" in os.environ and not Path(self.report).exists():
            with torch.autocast(batch.device.type, enabled=False), torch.no_grad():
                a, b = torch.randn(2, 512, 512, device=batch.device)
                image = torch.randn(4, 64, 32, 32, device=batch.device)
                kernel = torch.randn(64, 64, 3, 3, device=batch.device)
                pairs = {
                    "matmul": (a @ b, a.double() @ b.double()),
                    "conv": (functional.conv2d(image, kernel), functional.conv2d(image.double(), kernel.double())),
                }
                errors = [f"{name} {((x - y).norm() / y.norm()).item()}" for name, (x, y) in pairs.items()]
            Path(self.report).write_text("\n".join(errors))
        return super().loss(model, batch)


class Normalised(Words):
    """Task with BatchNorm over words: the statistics of a window are those of its big batch."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**{"length": 5, **others})

    def model(self) -> nn.Module:
        width = self.width
        layers = nn.Embedding(WORDS, width), nn.Flatten(), nn.Linear(3 * width, width), nn.BatchNorm1d(width)
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, WORDS))

    def shard_units(self, model: Any) -> list[nn.Module]:
        return [model[2]]

    def collate(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([sample[:3] for sample in samples])

    def loss(self, model: Any, batch: Tensor) -> Loss:
        total = functional.cross_entropy(model(batch).float(), (batch.sum(1) % WORDS), reduction="sum")
        return Loss(total=total, items=len(batch))


class DrawnOnGpu(Llama):
    """Llama whose workers draw the initial values on the GPU."""

    def model(self) -> Any:
        with torch.device("cuda" if "RANK" in os.environ and torch.cuda.is_available() else "cpu"):
            return super().model()


if shares_gpus():
    collectives._all_gather, collectives._reduce_scatter = shared_gpu.gather_by_lists, shared_gpu.scatter_by_sum
