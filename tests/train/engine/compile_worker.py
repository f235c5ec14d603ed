"""Compiled models under every strategy, run by test_engine.py: the same steps as without a compiler.

The backend is aot_eager: the graphs, guards and graph breaks of train.compile, without a C++ compiler. Prints one JSON
object from rank 0: for each case the relative distance of the parameters, how many operators were compiled, which
functions, and how often DDP let the compiler split its graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from launcher import Engine, make_plan
from tests.infra.workers import distance, flat, leave_group, print_on_rank_0

SAMPLES, WIDTH = 44, 16  # windows of 16, 16 and a short one of 12
CASES = [  # strategy, sync, recompute, precision, and what is compiled
    ("ddp", "boundary", "none", "bf16", "whole"),
    ("ddp", "boundary", "none", "fp32", "named"),  # by the task
    ("ddp", "boundary", "none", "fp32", "own"),  # by the user, without train.compile
    ("ddp", "every", "blocks", "fp32", "whole"),
    ("fsdp", "boundary", "blocks", "bf16", "named"),
    ("fsdp", "gather_once", "none", "fp32", "units"),
]


class Names:
    """Task that names the blocks."""

    def compile_units(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale[:, None] * self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two inputs, one of them on a residual stream in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)


def data() -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(WIDTH, generator=generator), torch.rand((), generator=generator), number % 3)
        for number in range(SAMPLES)
    ]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def trained(strategy: str, sync: str, recompute: str, precision: str, part: str, *, compiles: bool) -> Tensor:
    plan = make_plan(
        [
            f"strategy={strategy}", f"strategy.sync={sync}", f"strategy.recompute={recompute}",
            f"precision={precision}", "batch.global_size=16", "batch.micro_size=2", "train.epochs=1",
            "train.loader_workers=0", "cluster.device=cpu",
        ],
        samples=SAMPLES,
    )  # fmt: skip
    plan = dataclasses.replace(plan, train=dataclasses.replace(plan.train, compile=compiles and part != "own"))
    model = build()
    if compiles and part == "own":
        model.compile()
    owner = Names() if part == "named" else None
    engine = Engine(model, lambda p: torch.optim.SGD(p, 0.05), plan, owner=owner)

    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        x, scale, target = batch
        return functional.cross_entropy(model(x, scale), target, reduction="sum"), len(target)

    for window in engine.windows(data(), None, loss):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        engine.step()
        with torch.no_grad(), engine.parallel.evaluation(), engine.precision.autocast():  # as after train.eval_every
            x, scale, _ = torch.utils.data.default_collate(data()[:5])
            engine.parallel.module.eval()(x, scale)
            engine.parallel.module.train()
    return flat(engine.parallel.module.parameters())


def main() -> None:
    compile_with, functions = functools.partial(torch.compile, backend="aot_eager"), list[str]()

    def recorded(function: Any, **options: Any) -> Any:
        functions.append(function.__qualname__)
        return compile_with(function, **options | {"backend": "aot_eager"})

    torch.compile = recorded
    inside, splits = DistributedDataParallel._inside_ddp_forward, list[int]()
    setattr(  # noqa: B010
        DistributedDataParallel, "_inside_ddp_forward", lambda self: (splits.append(1), inside(self))[1]
    )
    results: dict[str, Any] = {}
    for case in CASES if sys.argv[1] == "all" else CASES[::2] + CASES[-1:]:
        torch._dynamo.reset()
        plain = trained(*case, compiles=False)
        counters.clear()
        functions.clear()
        splits.clear()
        compiled = trained(*case, compiles=True)
        results[" ".join(case)] = {
            "distance": distance(compiled, plain),
            # of each forward pass the linear layers of both blocks, whose graph may serve both
            "calls": counters["stats"]["calls_captured"],
            "functions": functions.copy(),
            "splits": len(splits),
        }
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
