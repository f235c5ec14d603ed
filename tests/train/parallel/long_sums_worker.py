"""Run by torchrun in test_base.py: windows of many micro-batches against the exact gradient.

argv: cases, each the overrides of a plan in one word, separated by spaces. Prints from rank 0 the relative error of the
gradient of each case.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher import Engine, make_plan
from launcher.train.world import World
from tests.infra.workers import leave_group, print_on_rank_0

WORLD, WIDTH = World.here(), 8


def samples(count: int) -> Tensor:
    return 1 + 0.5 * torch.rand(count, WIDTH, generator=torch.Generator().manual_seed(1))


def error(overrides: list[str], accumulation: int, dtype: torch.dtype) -> float:
    """Return the largest relative error of the window's mean gradient, which a step with lr=1 subtracts from zero."""
    data = samples(accumulation * WORLD.size)
    plan = make_plan(
        [
            f"batch.global_size={len(data)}", "batch.micro_size=1", "train.steps=1", "train.clip_norm=null",
            "optimizer=sgd", "schedule=constant", "schedule.warmup_steps=0", "run.calibrate_s=0",
            "train.loader_workers=0", f"cluster.workers_per_node={WORLD.size}", *overrides,
        ],
        samples=len(data),
    )  # fmt: skip
    assert plan.batch.accumulation == accumulation
    model = nn.Linear(WIDTH, 1, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), plan)
    for window in engine.windows(list(data)):
        for batch in window:
            engine.backward(engine.model(batch.to(model.weight.dtype)).float().sum(), len(batch))
        engine.step()
    found = model.weight.detach()
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return float((found.double() / -data.double().mean(0) - 1).abs().max())


errors = {}
for line in sys.argv[1:]:
    accumulation, dtype, *overrides = line.split()
    errors[line] = error(overrides, int(accumulation), getattr(torch, dtype))
print_on_rank_0(errors)
leave_group()
