"""Models and losses that write parameters, for test_lost_writes.py and its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from launcher import Engine, make_plan

OPTIONS = (
    "cluster.device=cpu", "precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "wandb.mode=disabled",
    "batch.global_size=8", "batch.micro_size=2", "strategy.sync=boundary",
)  # fmt: skip
SAMPLES = 64
Loss = Callable[[Any, Tensor], Tensor]


class Bag(nn.Module):
    """Args: options: of the embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 8, **options)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.slow = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.slow.requires_grad_(False)
        self.out = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        fast = slow = self.emb(x).mean(1)
        for block, other in zip(self.blocks, self.slow, strict=True):
            fast, slow = block(fast), other(slow.detach())
        return self.out(fast + slow) * self.frozen


def tokens(numbers: list[int]) -> Tensor:
    return torch.stack([torch.arange(6) * 7 * (number + 1) % 40 for number in numbers])


def plain(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().sum()


def writing(write: Callable[[Any, int], object]) -> Loss:
    """Return a loss that writes parameters first. ``write``: called with the model and the number of the call."""
    calls = iter(range(10_000))

    @torch.no_grad()
    def written(model: Any) -> None:
        write(model, next(calls))

    def loss(model: Any, x: Tensor) -> Tensor:
        written(model)
        return plain(model, x)

    return loss


def normalise(model: Any, call: int) -> None:  # noqa: ARG001
    model.out.weight.copy_(functional.normalize(model.out.weight, dim=1))


def replace(model: Any, call: int) -> None:  # noqa: ARG001
    model.out.weight.data = model.out.weight.data.clone()


def follow(model: Any, call: int) -> None:  # noqa: ARG001
    """Let slow blocks follow the others: all of them are shards while no unit runs."""
    for slow, fast in zip(model.slow.parameters(), model.blocks.parameters(), strict=True):
        slow.mul_(0.9).add_(fast, alpha=0.1)


def zero_row(model: Any) -> None:
    model.blocks[0][0].weight[5].zero_()


def zero_row_of_whole(model: Any) -> None:
    weight = model.blocks[0][0].weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
    whole[5] = 0
    weight.copy_(
        distribute_tensor(whole, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else whole
    )


def zero_rows_of_gradient(optimizer: Any, *_: object) -> None:
    optimizer.param_groups[0]["params"][0].grad[2:].zero_()


def divide_by_norm(model: Any) -> None:
    model.out.weight.div_(model.out.weight.norm().item())


def divide_by_whole_norm(model: Any) -> None:
    norm = model.out.weight.norm()
    model.out.weight.div_((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def read_rows(model: Any) -> None:
    """Compute a copy of rows, and write that."""
    model.out.weight.mul_(1 / (1 + model.out.weight[1].clone().mul_(2).norm()))


def train(
    loss: Loss,
    steps: int,
    *options: str,
    on_step: Callable[[Any], object] | None = None,
    before_step: Callable[..., None] | None = None,
    **bag: Any,
) -> Engine:
    """Train for ``steps`` windows.

    Args:
        on_step: called with the model after each step.
        before_step: hook of the optimizer.
    """

    class After:
        @torch.no_grad()
        def on_step(self, engine: Engine, result: object) -> None:  # noqa: ARG002
            if on_step is not None:
                on_step(engine.model)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Bag(**bag)

    plan = make_plan([*OPTIONS, f"train.steps={steps}", *options], samples=SAMPLES)
    engine = Engine(model, lambda p: torch.optim.SGD(p, 0.05), plan, callbacks=[After()])
    if before_step is not None:
        engine.optimizer.register_step_pre_hook(before_step)
    for window in engine.windows(range(SAMPLES), tokens):
        for batch in window:
            engine.backward(loss(engine.model, batch), len(batch))
        engine.step()
    return engine
