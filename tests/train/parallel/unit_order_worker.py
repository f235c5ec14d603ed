"""Ranks whose samples decide which shard units run, run by test_unit_order.py. Each rank prints its error."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from tests.infra.workers import message_of

CASE, *OPTIONS = sys.argv[1:]
SETTINGS = (
    "cluster.device=cpu", "cluster.workers_per_node=2", "precision=fp32", "run.calibrate_s=0", "train.loader_workers=0",
    "wandb.mode=disabled", "batch.global_size=8", "batch.micro_size=2", "train.steps=2", "strategy=fsdp",
)  # fmt: skip


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.towers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        h = self.body(x)
        return torch.stack([self.towers[tower](h).square() * (tower + 1) for tower in order]).sum()


def order() -> list[int]:
    """Return the towers that this rank runs."""
    rank = int(os.environ["RANK"])
    return {"order": [rank, 1 - rank], "skipped": [0, 1][: 1 + rank]}[CASE]


def train() -> None:
    engine = Engine(Towers, lambda p: torch.optim.SGD(p, 0.01), make_plan([*SETTINGS, *OPTIONS], samples=32))
    for window in engine.windows(range(32), lambda numbers: torch.tensor(numbers).float().outer(torch.ones(4))):
        for batch in window:
            engine.backward(engine.model(batch, order()), len(batch))
        engine.step()


if __name__ == "__main__":
    os.write(1, f"told: {message_of(train)}\n".encode())  # at once: the ranks print at the same time
    os._exit(0)  # exchanges are in progress, which nobody completes
