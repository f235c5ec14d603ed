"""Losses that run collectives, in windows of one and of two micro-batches; run by torchrun in test_loss_watches.py.

Prints one JSON object from rank 0: the message of each case on all ranks, empty if the window was applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn import functional

from launcher import Engine, Loss, make_plan
from launcher.errors import LauncherError
from launcher.train.engine.loss_watches import LossCollectives
from tests.infra.workers import leave_group, print_on_rank_0

COMMON = (
    "precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "optimizer=sgd",
    "schedule=constant", "schedule.warmup_steps=0",
)  # fmt: skip
TWO = "batch.micro_size=2"  # of four in each window
METHODS = dict(vars(dist.ProcessGroup))


class Model(nn.Module):
    def __init__(self, *, gathers: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.gathers = nn.Linear(6, 4), norm or nn.Identity(), gathers

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.body(x))
        return Gather.apply(rows) if self.gathers else rows  # pyright: ignore[reportReturnType]


class Gather(torch.autograd.Function):
    """The usual hand-written one: rows of all ranks, and of the gradient this rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        ctx.rows = len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.rows :][: ctx.rows]


class GatheringNorm(nn.BatchNorm1d):
    """BatchNorm over the ranks, in the way of torch's SyncBatchNorm, which supports no CPUs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
        return input - Gather.apply(input).mean(0)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def contrastive(rows: Tensor, everyone: Tensor) -> Loss:
    own = torch.arange(len(rows)) + dist.get_rank() * len(rows)
    return Loss(functional.cross_entropy(rows @ everyone.T, own, reduction="sum"), len(rows))


def without_gradient(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    with torch.no_grad():
        dist.all_gather(parts, rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def plain(rows: Tensor) -> Loss:
    return Loss(rows.square().sum(), len(rows))


def with_count(rows: Tensor) -> Loss:
    count = torch.tensor([len(rows), 1.0])
    dist.all_reduce(count)
    return plain(rows)


def with_objects(rows: Tensor) -> Loss:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, "rank")
    dist.barrier()
    return plain(rows)


def variance(rows: Tensor) -> Loss:
    mean = all_reduce(rows.mean(0)) / dist.get_world_size()  # pyright: ignore[reportOperatorIssue]
    return Loss((rows - mean).square().sum(), len(rows))


def gathered(rows: Tensor) -> Loss:
    return contrastive(rows, torch.cat(all_gather(rows)))  # pyright: ignore[reportArgumentType]


def functionally_gathered(rows: Tensor) -> Loss:
    group = dist.group.WORLD
    everyone = functional_collectives.all_gather_tensor_autograd(rows.contiguous(), 0, group)  # pyright: ignore
    return contrastive(rows, everyone)


def run(loss: Callable[[Tensor], Loss], model: Callable[[], nn.Module] = Model, *overrides: str) -> str:
    """Return the error of one window; empty if it was applied."""
    plan = make_plan([*COMMON, *overrides], samples=16)
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.1), plan)
    data = list(torch.randn(16, 6, generator=torch.Generator().manual_seed(1)))
    before = engine.model.state_dict()["body.weight"].clone()
    try:
        for window in engine.windows(data):
            for batch in window:
                engine.backward(loss(engine.model(batch)))
            engine.step()
            break
        assert not any(isinstance(watch, LossCollectives) for watch in engine._watches), "after a window"
    except LauncherError as error:
        assert engine.steps == 0
        assert torch.equal(engine.model.state_dict()["body.weight"], before)
        return f"{type(error).__name__}: {error}"
    return ""


CASES: dict[str, Callable[[], str]] = {
    "torch.distributed.nn": lambda: run(gathered, Model, TWO),
    "functional": lambda: run(functionally_gathered, Model, TWO),
    "a Function of one's own": lambda: run(lambda rows: contrastive(rows, Gather.apply(rows)), Model, TWO),  # pyright: ignore
    "in the model": lambda: run(plain, lambda: Model(gathers=True), TWO),
    "without gradient": lambda: run(lambda rows: contrastive(rows, without_gradient(rows)), Model, TWO),
    "a mean with gradient": lambda: run(variance, Model, TWO),
    "fsdp": lambda: run(gathered, Model, TWO, "strategy=fsdp"),
    "one micro-batch": lambda: run(gathered, Model, "batch.micro_size=4"),
    "a count": lambda: run(with_count, Model, TWO),
    "objects": lambda: run(with_objects, Model, TWO),
    "no collective": lambda: run(plain, Model, TWO, "strategy=fsdp"),
    "batch.norm=sync": lambda: run(plain, lambda: Model(norm=nn.BatchNorm1d(4)), TWO, "batch.norm=sync"),
    "another BatchNorm": lambda: run(plain, lambda: Model(norm=GatheringNorm(4, affine=False)), TWO),
}


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames its collectives
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        message = case()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, message)
        found[name] = everyone
    assert dict(vars(dist.ProcessGroup)) == METHODS  # nothing is recorded any more
    print_on_rank_0(found)
    leave_group()


if __name__ == "__main__":
    main()
