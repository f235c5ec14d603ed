"""Parameters after some windows with several optimizers and groups; started by torchrun from test_optimizers.py.

Rank 0 prints for each case of argv the largest relative difference from one process with one big batch in fp64.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from launcher import Engine, make_plan
from launcher.config.schema import Device
from launcher.train.data.randomness import Permutation
from launcher.train.engine.build import FromModel
from launcher.train.optimizers import build_optimizer
from tests.infra.workers import leave_group, print_on_rank_0

STEPS, SAMPLES, SIZE = 6, 48, 16
GROUPS = (
    "optimizer.groups=[{match: 'ndim<2', weight_decay: 0}, {match: '^embed', lr: 0.02, betas: [0.5, 0.9]},"
    "{match: 'up.weight', _target_: torch.optim.SGD, lr: 0.1, momentum: 0.9},"
    "{match: 'mix', _target_: torch.optim.RMSprop, lr: 0.01, alpha: 0.9}]"
)
SETTINGS = ["optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.betas=[0.9,0.95]", "schedule.warmup_steps=2"]


class Model(nn.Module):
    """Unlike the bundled ones: tied weights, a frozen part, a convolution, a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embed(tokens))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2).tanh()
        return self.head(self.norm(x + self.scale * self.up(x).relu()))


TABLE = torch.randint(0, 11, (SAMPLES, 7), generator=torch.Generator().manual_seed(5))


def loss_sum(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[
        :, 1:
    ].numel()


def reference() -> list[Tensor]:
    """By hand: the groups spelt out, one process, one batch, fp64."""
    model = Model().double()
    by_name = dict(model.named_parameters())
    vectors = [p for name, p in by_name.items() if p.requires_grad and p.ndim < 2]
    optimizers: list[Optimizer] = [
        AdamW(vectors, 0.01, betas=(0.9, 0.95), weight_decay=0.0),
        AdamW([by_name["embed.weight"]], 0.02, betas=(0.5, 0.9), weight_decay=0.1),
        SGD([by_name["up.weight"]], 0.1, momentum=0.9),
        RMSprop([by_name["mix.weight"]], 0.01, alpha=0.9),
    ]  # fmt: skip
    plan = make_plan(options(["strategy=ddp"]), samples=SAMPLES)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    order: list[Tensor] = []
    for epoch in range(STEPS * SIZE // SAMPLES):
        indices = Permutation(SAMPLES, plan.train.seed, epoch).take(0, SAMPLES)
        order += [TABLE[indices[start : start + SIZE]] for start in range(0, SAMPLES, SIZE)]
    for step, batch in enumerate(order):
        model.zero_grad()
        total, items = loss_sum(model, batch)
        (total / items).backward()
        for optimizer, peaks in zip(optimizers, rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * plan.schedule.factor(step, STEPS)
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def options(extra: list[str]) -> list[str]:
    sizes = [f"batch.global_size={SIZE}", "batch.micro_size=2", f"train.steps={STEPS}", "train.loader_workers=0"]
    return [*sizes, "precision=fp32", "train.clip_norm=null", *SETTINGS, GROUPS, *extra]


def main() -> None:
    expected = reference()
    for case in sys.argv[1:]:
        plan = make_plan(options(case.split("/")), samples=SAMPLES)
        model = Model()
        engine = Engine(
            model, FromModel(lambda m, plan=plan: build_optimizer(m, plan.optimizer, Device.cpu)), plan,
            shard_units=lambda m: [m.up],
        )  # fmt: skip
        for window in engine.windows(range(SAMPLES), lambda indices: TABLE[indices]):
            for batch in window:
                engine.backward(*loss_sum(engine.model, batch))
            engine.step()
        seen = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        worst = max(((a.detach().double() - b).norm() / b.norm()).item() for a, b in zip(seen, expected, strict=True))
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        print_on_rank_0({"case": case, "worst": worst, "groups": len(rates), "first": rates[0]})
    leave_group()


if __name__ == "__main__":
    main()
