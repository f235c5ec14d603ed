"""Run by test_base.py: BatchNorm on ranks that see different data. Prints one JSON object a strategy."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.plan.sync_policy import Collective
from tests.infra.workers import leave_group, print_on_rank_0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("constant", torch.full((1000,), 2.0))
        self.register_buffer("average", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean()  # a new tensor in the old one's place
        return self.body(x) * self.constant[0]


def run(overrides: list[str], data: list[Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    plan = make_plan([*overrides, "precision=fp32", "train.loader_workers=0"], samples=len(data))
    engine = Engine(Model, lambda p: torch.optim.SGD(p, 0.01), plan)
    model: Any = engine.parallel.module
    apart, sent, seen = [], [], 0
    for window in engine.windows(data):
        for number, batch in enumerate(window):
            if number == 0:
                # as objects: a gather of tensors before the backward pass is refused
                means = engine.world.of_all(torch.cat((model.body[1].running_mean, model.average)))
                apart.append(max((mean - means[0]).abs().max().item() for mean in means))
            seen += engine.samples_in_batch > 0
            engine.backward((engine.model(batch) ** 2).sum(), len(batch))
        result = engine.step()
        broadcast = result.comm.kinds.get(Collective.broadcast)
        sent.append(broadcast.payload_bytes if broadcast else 0)
    return {"apart": apart, "sent": sent, "counted": int(model.body[1].num_batches_tracked), "seen": seen}


def main() -> None:
    data = list(torch.randn(160, 8, generator=torch.Generator().manual_seed(1)).cumsum(0) / 10)
    common = ["batch.global_size=16", "batch.micro_size=4", "train.steps=8"]
    for strategy in sys.argv[1:]:
        seen = run([*common, *strategy.split()], data)
        print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
