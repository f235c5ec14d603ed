"""Tasks for `launch verify` whose gradient is that of the big batch; mistaken_tasks.py has one for each mistake."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

import launcher
from launcher import Loss

WORDS, WIDTH = 30, 12


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Most of a micro-batch is padding: one sentence in four is long."""

    def __init__(self, count: int = 29, seed: int = 3, most: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [most if n % 4 == 0 else 2 + n % 3 for n in range(count)]
        self.data = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def bag_of_words(extra: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh(), extra or nn.Identity(), nn.Linear(WIDTH, WORDS))


def token_loss(model: Any, batch: Tensor, reduction: str = "sum") -> Tensor:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction=reduction)


def tokens(batch: Tensor) -> Tensor:
    return (batch[:, 1:] != 0).sum()


class Padded:
    """Exact task, from which the others are derived."""

    def model(self) -> nn.Module:
        return bag_of_words()

    def train_data(self) -> Any:
        return Sentences()

    def collate(self, samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: Any, batch: Tensor) -> Any:
        return Loss(total=token_loss(model, batch), items=tokens(batch))


class Curriculum(Padded):
    """Its loss depends on the step, the epoch and the device that its context has."""

    def loss(self, model: Any, batch: Tensor) -> Loss:
        now = launcher.current()
        weight = torch.tensor(1 + now.step + 10 * now.epoch, device=now.device)
        now.log("weight", weight)
        return Loss(token_loss(model, batch) * weight, tokens(batch))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.next, self.length = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.words(inputs).tanh()
        middle = (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return self.next(hidden), self.length(middle).squeeze(1)


class MultiLoss(Padded):
    """Two heads with a loss each, and samples as items; one loss is a mean within each sample."""

    def model(self) -> nn.Module:
        return TwoHeads()

    def loss(self, model: Any, batch: Tensor) -> Any:
        valid = (batch[:, 1:] != 0).float()
        following, length = model(batch[:, :-1], valid)
        each = functional.cross_entropy(following.transpose(1, 2), batch[:, 1:], reduction="none")
        spoken = (each * valid).sum(1) / valid.sum(1)
        total = spoken + 0.3 * (length - valid.sum(1).log()).square()
        return Loss(total=total.sum(), items=len(batch))


class Tied(Padded):
    def model(self) -> nn.Module:
        model = bag_of_words()
        model[3].weight = model[0].weight
        return model


class Counter(nn.Module):
    """Module with a constant buffer that scales, and two that follow the data and do not affect the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.scale


class Buffered(Padded):
    def model(self) -> nn.Module:
        return bag_of_words(Counter())


class Dropped(Padded):
    """Dropout of a module, of a function and of attention."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.dropout(self.drop(x), 0.2, self.training)
            return x + functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)

    def model(self) -> nn.Module:
        return bag_of_words(self.Attend())


class Augmented(Padded):
    class Data(Sentences):
        def __getitem__(self, index: int) -> Tensor:
            return self.data[index].roll(int(torch.randint(5, ())))

    def train_data(self) -> Any:
        return self.Data()


class Streamed(Padded):
    class Data(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(Sentences().data)

    def train_data(self) -> Any:
        return self.Data()


class StreamedFiles(Padded):
    """A stream that a job divides, and that is read whole here."""

    class Data(Streamed.Data):
        num_shards = 4

        def shard(self, num_shards: int, index: int) -> Any:
            return Sentences().data[index::num_shards]

    def train_data(self) -> Any:
        return self.Data()


class Bf16Parameters(Padded):
    """Sum over tokens, with a model in bf16."""

    def model(self) -> nn.Module:
        return bag_of_words(nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))).bfloat16()

    def loss(self, model: Any, batch: Tensor) -> Any:
        logits, targets = model(batch[:, :-1]).float(), batch[:, 1:]
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return Loss(total=total, items=tokens(batch))


class Adapted(Bf16Parameters):
    """A frozen bf16 model with trained fp32 layers before and behind it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
            self.base.requires_grad_(False)

        def forward(self, words: Tensor) -> Tensor:
            x = self.before(words)
            return self.behind(x + self.base(x.to(self.base[0].weight.dtype)).to(x.dtype))

    def model(self) -> nn.Module:
        return self.Model()


class Gathered(Padded):
    """Contrastive loss over the samples of all ranks, which is exact with accumulation 1."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        # equal lengths, so that padding has no effect
        pooled = model(batch[:, :2]).mean(1)
        everyone = torch.cat(all_gather(pooled))  # pyright: ignore[reportArgumentType]
        first = dist.get_rank() * len(pooled)
        own = torch.arange(first, first + len(pooled))
        total = functional.cross_entropy(pooled @ everyone.T, own, reduction="sum")
        return Loss(total=total, items=len(batch))


class Matched:
    """Contrastive loss over all samples of a window, with dropout in the model."""

    def model(self) -> nn.Module:
        return bag_of_words(nn.Dropout(0.2))

    def train_data(self) -> Any:
        return Sentences()

    def collate(self, samples: list[Tensor]) -> Tensor:
        return Padded().collate(samples)

    def eval_data(self) -> Any:
        return Sentences(7)

    def outputs(self, model: Any, batch: Tensor) -> Any:
        hidden = model(batch[:, :2])
        return functional.normalize(hidden[:, 0], dim=1), functional.normalize(hidden[:, 1], dim=1)

    def window_loss(self, outputs: tuple[Tensor, Tensor]) -> Loss:
        one, other = outputs
        own = torch.arange(len(one), device=one.device)
        return Loss(functional.cross_entropy(8 * one @ other.T, own, reduction="sum"), len(one))


class Denoising:
    """Several inputs, integers and time steps up to 993 among them, a residual stream in fp32, a mean of its own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(5)  # initial values that the job's seed does not decide
            self.frequencies = nn.Parameter(torch.rand(8, generator=generator) / 50)
            self.kinds, self.blocks = nn.Embedding(3, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.inputs, self.outputs = nn.Linear(4, 16), nn.Linear(16, 4)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, noisy: Tensor, *, time: Tensor, kind: dict[str, Tensor]) -> Tensor:
            angles = time[:, None] * self.frequencies
            stream = self.inputs(noisy) + torch.cat((angles.sin(), angles.cos()), 1) + self.kinds(kind["id"])
            for block in self.blocks:
                stream = stream + block(functional.layer_norm(stream * self.scale, (16,))).tanh()
            return self.outputs(stream)

    def model(self) -> nn.Module:
        return self.Model()

    def train_data(self) -> Any:
        self.center = torch.tensor([0.5, -0.5, 0.0, 0.25])  # loss() needs what is known here only
        numbers = torch.Generator().manual_seed(2)
        rows = [
            {"x": torch.randn(4, generator=numbers), "time": torch.rand((), generator=numbers) * 993, "id": n % 3}
            for n in range(40)
        ]
        return torch.utils.data.random_split(rows, [29, 11])[0]  # pyright: ignore[reportArgumentType]

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Any:
        found = model(batch["x"], time=batch["time"], kind={"id": batch["id"]})
        return ((found - batch["x"] + self.center) ** 2).mean()


class Advantages(Padded):
    """A loss of both signs, whose sum is near zero."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        chances = -functional.cross_entropy(model(batch[:, :1])[:, 0].float(), batch[:, 1], reduction="none")
        signs = torch.where(batch[:, 0] % 2 == 0, 1.0, -1.0)
        return Loss(total=(chances * signs).sum(), items=len(batch))


class Surrogate(Padded):
    """A policy's first update: the losses of a sample's tokens are its advantages, whose sum is zero but for
    rounding."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        targets, valid = batch[:, 1:], (batch[:, 1:] != 0).float()
        chances = -functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2).float(), targets, reduction="none")
        rewards = (0.37 * targets).sin() * valid
        advantages = (rewards - rewards.sum(1, keepdim=True) / valid.sum(1, keepdim=True)) * valid
        return Loss(total=((chances - chances.detach()).exp() * advantages).sum(), items=tokens(batch))
