"""Loops over ragged samples in micro-batches bounded in tokens, run by test_length_balance.py.

Prints one JSON object from rank 0: by strategy, the parameters after 8 steps and the micro-batches of each window.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from torch import nn

from launcher import Engine, make_plan
from launcher.train.data.sample_order import ArrangedData
from tests.infra.workers import leave_group

LENGTHS = [random.Random(n).choice((3, 10, 40, 200)) + n % 3 for n in range(103)]
VALUES = list(torch.linspace(-1, 1, 309).reshape(103, 3))


def trained(*options: str) -> tuple[list[float], list[int]]:
    plan = make_plan(
        [*options, "batch.global_size=16", "train.steps=8", "cluster.device=cpu", "precision=fp32",
         "train.loader_workers=0", "run.calibrate_s=0"], samples=103,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan, shard_units=lambda model: [model[0]])
    counts: list[int] = []
    for window in engine.windows(ArrangedData(VALUES, lengths=LENGTHS)):
        for batch in window:
            engine.backward((engine.model(batch) - 1).square().sum(), len(batch))
        counts.append(engine.step().micro_batches)
    whole: list[Any] = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([*map(torch.flatten, whole)]).tolist(), counts


if __name__ == "__main__":
    found = {
        strategy: trained(
            f"strategy={strategy}", "batch.micro_size=8", "batch.balance=length", "batch.micro_tokens=500"
        )
        for strategy in ("ddp", "fsdp")
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    leave_group()
