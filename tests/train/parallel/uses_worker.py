"""Units that run more than once in a micro-batch, and losses that hold a gradient, run by test_base.py.

Prints one JSON object from rank 0: by case, how far the gradient of one window is from that of fp64, beside how far
plain torch's is, of the same window as one batch in one process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.world import World, device_of, join
from tests.infra.workers import distance, flat, leave_group, print_on_rank_0

RANKS = int(sys.argv[1])
WIDTH, SAMPLES, MICRO = 8, 32, 4
POLICIES: dict[int, list[tuple[str, ...]]] = {
    1: [("strategy=single",), ("strategy=fsdp", "strategy.sync=boundary")],
    4: [
        ("strategy=ddp", "strategy.sync=boundary"),
        ("strategy=fsdp", "strategy.sync=every"),
        ("strategy=fsdp", "strategy.sync=boundary"),
        ("strategy=fsdp", "strategy.sync=boundary", "strategy.recompute=blocks"),
        ("strategy=fsdp", "strategy.sync=gather_once"),
        ("strategy=hsdp", "strategy.shard_size=2", "strategy.sync=every"),
        ("strategy=hsdp", "strategy.shard_size=2", "strategy.sync=replicas_at_boundary"),
    ],
}
OPTIONS = (
    "train.loader_workers=0", "train.clip_norm=null", "train.steps=1", f"batch.global_size={SAMPLES}",
    f"batch.micro_size={MICRO}", "cluster.device=cpu", f"cluster.workers_per_node={RANKS}",
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.softplus(self.up(self.norm(x))))


class Model(nn.Module):
    """Args: rounds: how often each block runs in a forward pass."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.blocks, self.head, self.rounds = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, WIDTH), rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Backwards(Model):
    """Model that runs its blocks in another order than that of their definition."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Scoring(nn.Linear):
    """Head that computes the loss."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return functional.cross_entropy(super().forward(x).double(), targets, reduction="sum")


HEAD: Callable[[int, int], nn.Linear] = functools.partial(Scoring, bias=False)  # set by a test of another head


class Words(Model):
    """Language model whose head is its embedding, and whose loss is computed in the head."""

    def __init__(self) -> None:
        super().__init__(1)
        self.words, self.head = nn.Embedding(40, WIDTH), HEAD(WIDTH, 40)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        x = x + self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


def shared(model: Any, x: Tensor) -> Tensor:
    return model(x).double().square().sum()


def siamese(model: Any, x: Tensor) -> Tensor:
    return (model(x).double() - model(x.flip(1)).double() + 1).square().sum()


def penalty(model: Any, x: Tensor) -> Tensor:
    """Loss of a critic: forward passes before and after the one whose gradient is in the loss."""
    before, at = model(x * 0.5), (x * 0.7).requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).double().square().sum(), at, create_graph=True)
    after = model(x)
    slope = gradient.double().square().sum(1).sqrt()
    return (before.double() - after.double()).square().sum() + (slope - 1).square().sum()


def adversarial(model: Any, x: Tensor) -> Tensor:
    """The gradient in the loss is no part of what is trained."""
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(at).double().square().sum(), at)
    return model(x + 0.1 * gradient.detach()).double().square().sum()


def vocabulary(model: Any, x: Tensor) -> Tensor:
    return model(x, x.argmin(1), x.argmax(1))


LossOf = Callable[[Any, Tensor], Tensor]
# with the rounds of the model; 0: that of words
LOSSES: dict[str, tuple[int, LossOf]] = {
    "shared": (3, shared),
    "siamese": (1, siamese),
    "penalty": (1, penalty),
    "adversarial": (1, adversarial),
    "vocabulary": (0, vocabulary),
}


def build(rounds: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(rounds) if rounds else Words()


def batch_of(indices: list[int]) -> Tensor:
    return torch.stack([torch.sin(torch.arange(1.0, WIDTH + 1) * (index + 1)) for index in indices])


def by_hand(model: nn.Module, loss: LossOf, dtype: torch.dtype, *, autocast: bool = False) -> Tensor:
    """The gradient of the window as one batch: plain torch."""
    model = model.to(dtype)
    samples = batch_of(list(Permutation(SAMPLES, 0, 0).take(0, SAMPLES))).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total = loss(model, samples)
    (total / SAMPLES).backward()
    return flat([p.grad for p in model.parameters() if p.grad is not None])


def windows(model: Any, loss: LossOf, *options: str, calibrates: bool = True) -> tuple[list[Tensor], dict[str, int]]:
    """The gradients that the engine applies in each window, with a learning rate of 0, and the last one's collectives.

    Args:
        model: the model, or a function that makes it.
    """

    def forward(model: Any, batch: Tensor) -> tuple[Tensor, int]:
        return loss(model, batch), len(batch)

    plan = make_plan([*OPTIONS, *options], samples=SAMPLES)
    engine = Engine(model, lambda p: torch.optim.SGD(p, 0.0), plan)
    parameters = [p for p in engine.parallel.module.parameters() if p.requires_grad]
    found, collectives = list[Tensor](), dict[str, int]()
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat([p.grad for p in parameters])))
    for batches in engine.windows(range(SAMPLES), batch_of, forward=forward if calibrates else None):
        for batch in batches:
            engine.backward(*forward(engine.model, batch))
        collectives = {kind.value: traffic.collectives for kind, traffic in engine.step().comm.kinds.items()}
    return found, collectives


def with_evaluations(sync: str, *, evaluates: bool) -> list[float]:
    """Return the losses of four windows. ``evaluates``: with other parameters after each of them, as `Ema` does."""
    options = ["strategy=fsdp", f"strategy.sync={sync}", "precision=fp32", "run.calibrate_s=0"]
    plan = make_plan(
        [*OPTIONS, *options, "batch.global_size=8", "batch.micro_size=2", "train.steps=4"], samples=SAMPLES
    )
    torch.manual_seed(0)
    engine = Engine(lambda: Backwards(1), lambda p: torch.optim.SGD(p, 0.1), plan)
    parameters, losses = list(engine.parallel.module.parameters()), list[float]()
    for batches in engine.windows(range(SAMPLES), batch_of):
        for batch in batches:
            engine.backward(shared(engine.model, batch), len(batch))
        losses.append(engine.step().loss)
        if evaluates:
            with torch.no_grad():
                kept = [parameter.clone() for parameter in parameters]
                for parameter in parameters:
                    parameter.mul_(3.0)
                with engine.parallel.evaluation():
                    engine.parallel.module(batch_of([0, 1]))
                for parameter, value in zip(parameters, kept, strict=True):
                    parameter.copy_(value)
    return losses


def joined() -> None:
    """Let all ranks join before their first model is made."""
    plan = make_plan([*OPTIONS, "strategy=ddp" if RANKS > 1 else "strategy=single"], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)


def main() -> None:
    joined()
    results: dict[str, Any] = {}
    for case, (name, (rounds, loss)) in enumerate(LOSSES.items()):
        exact = by_hand(build(rounds), loss, torch.float64)
        for wide, precision in enumerate(("bf16", "fp32")):  # bf16 is the default
            at_once = distance(by_hand(build(rounds), loss, torch.float32, autocast=precision == "bf16"), exact)
            for number, policy in enumerate(POLICIES[RANKS]):
                if "half" in sys.argv and (case + wide + number) % 2:  # each loss and policy once, in one of them
                    continue
                # the calibration runs the same losses without collectives
                calibrates = "run.calibrate_s=0" if precision == "bf16" else "run.calibrate_s=0.01"
                options = (*policy, f"precision={precision}", calibrates)
                (gradient,), collectives = windows(functools.partial(build, rounds), loss, *options)
                error = {"error": distance(gradient, exact), "at once": at_once}
                results[f"{name} {precision} {' '.join(policy)}"] = {**error, "collectives": collectives}
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
