"""Run by torchrun in test_ddp.py: prints the collectives of a window with ``strategy.find_unused_parameters``."""

from __future__ import annotations

import torch
from torch import nn

from launcher import Engine, make_plan
from launcher.train.world import World
from tests.infra.workers import leave_group, print_on_rank_0

plan = make_plan(
    [
        "strategy=ddp", "strategy.sync=every", "strategy.find_unused_parameters=true", "precision=fp32",
        "batch.global_size=8", "batch.micro_size=2", "train.steps=2", "train.loader_workers=0", "run.calibrate_s=0",
        f"cluster.workers_per_node={World.here().size}",
    ],
    samples=16,
)  # fmt: skip
model = nn.Linear(3, 1)
engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
for window in engine.windows(list(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))):
    for batch in window:
        engine.backward(engine.model(batch).sum(), len(batch))
    comm = engine.step().comm
print_on_rank_0(
    {
        "payload": [traffic.payload_bytes for traffic in comm.kinds.values()],
        "collectives": comm.collectives,
        "saved": comm.wire_bytes_every - comm.wire_bytes,
    }
)
leave_group()
