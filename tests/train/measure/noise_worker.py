"""Run by torchrun in test_noise.py: a problem whose gradient noise scale is known, under each argv line's options.

Sample j has m_j items, each a vector x of WIDTH numbers, N(mean, deviation^2); the loss of an item is |w - x|^2 / 2 and
w stays 0. So the gradient of an item is -x: |G|^2 = |mean|^2 = 1, and tr(Sigma) of an item is SCALE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, make_plan
from tests.infra.workers import leave_group, print_on_rank_0

WIDTH, SCALE, WINDOWS, GLOBAL = 256, 24.0, 120, 32


def counted(place: Any, name: str, counts: Callable[..., bool]) -> list[int]:
    """A list whose one element grows with each such call of ``place.name`` from now on."""
    function, calls = getattr(place, name), [0]

    def calling(*arguments: Any, **named: Any) -> Any:
        calls[0] += counts(*arguments)
        return function(*arguments, **named)

    setattr(place, name, calling)
    return calls


# gradients are fp32 at most: these are the engine's own numbers
SMALL_REDUCES = counted(dist, "all_reduce", lambda tensor, *_: tensor.dtype == torch.float64)
BACKWARDS = counted(torch.autograd, "backward", lambda *_: True)


class Shift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight - x


class Model(nn.Module):
    """Several buckets, and shard units with a root beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shift(WIDTH // 4) for _ in range(3))
        self.rest = Shift(WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(WIDTH // 4, -1)
        return torch.cat([part(piece) for part, piece in zip([*self.parts, self.rest], pieces, strict=True)], -1)


def samples(most_items: int) -> list[tuple[Tensor, int]]:
    """(most_items vectors of which the first m are items, m). One short window at the end."""
    generator = torch.Generator().manual_seed(3)
    count = WINDOWS * GLOBAL + GLOBAL // 2
    numbers = torch.randint(1, most_items + 1, (count,), generator=generator)
    vectors = torch.randn(count, most_items, WIDTH, generator=generator) * (SCALE / WIDTH) ** 0.5 + WIDTH**-0.5
    return list(zip(vectors, numbers.tolist(), strict=True))


def run(options: list[str]) -> dict[str, Any]:
    most_items = 5 if "items" in options else 1
    data = samples(most_items)
    base = [f"batch.global_size={GLOBAL}", "train.epochs=1", "schedule=constant", "train.loader_workers=0"]
    plan = make_plan([*base, "run.calibrate_s=0", *[o for o in options if o != "items"]], samples=len(data))
    engine = Engine(Model, lambda parameters: torch.optim.SGD(parameters, lr=0.0), plan)
    seen: list[int] = []
    work: set[tuple[int, int]] = set()
    for window in engine.windows(data):
        for vectors, numbers in window:
            valid = torch.arange(most_items) < numbers[:, None]
            engine.backward(0.5 * (engine.model(vectors)[valid] ** 2).sum(), valid.sum())
        result = engine.step()
        if engine.noise is not None:
            seen.append(result.window)
        if result.window:  # the first one agrees on a divisor too
            work.add((SMALL_REDUCES[0], BACKWARDS[0] - result.micro_batches))
        SMALL_REDUCES[0] = BACKWARDS[0] = 0
    noise = engine.noise
    values = noise and {
        "scale": noise.scale, "grad_sq": noise.grad_sq, "variance": noise.variance, "interval": [noise.low, noise.high]
    }  # fmt: skip
    before = engine.state_dict()["noise"]  # settles what waits; once
    items = sum(number for _, number in data) / len(data)
    everyone: list[Any] = [None] * engine.world.size
    dist.all_gather_object(everyone, (values, before, engine.state_dict()["noise"]))
    assert all(other == everyone[0] for other in everyone), "all ranks keep the same"
    assert everyone[0][1] == everyone[0][2]
    return {"noise": values, "items": items, "first": seen[0] if seen else None,
            "micro": plan.batch.micro_size, "windows": before["windows"], "work": sorted(work),
            "shards": plan.strategy.shard_size}  # fmt: skip


def main() -> None:
    for line in sys.argv[1:]:
        seen = run(line.split())
        print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
