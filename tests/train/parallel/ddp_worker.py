"""Windows of one and of two micro-batches under DDP, in turn, run by test_ddp.py on two ranks.

Prints one JSON object from rank 0: the number of micro-batches of each window, how far the parameters are from those of
plain torch after it, and how many storages held the gradients in it, those between two windows included.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from launcher import Engine, make_plan
from tests.infra.workers import leave_group, print_on_rank_0

SAMPLES, GLOBAL, MICRO, EPOCHS = 12, 8, 2, 3


def storages(model: nn.Module) -> set[int]:
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}


def main() -> None:
    plan = make_plan(
        ["strategy=ddp", f"strategy.sync={sys.argv[1]}", f"batch.global_size={GLOBAL}", f"batch.micro_size={MICRO}",
         f"train.epochs={EPOCHS}", "train.shuffle=false", "train.loader_workers=0", "schedule=constant",
         "schedule.warmup_steps=0", "cluster.device=cpu", "precision=fp32", "cluster.workers_per_node=2"],
        samples=SAMPLES,
    )  # fmt: skip
    torch.manual_seed(0)
    model, plain, data = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(SAMPLES, 8)
    plain.load_state_dict(model.state_dict())
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).square().sum()

    seen: list[tuple[int, float, int]] = []
    start = 0
    for window in engine.windows(TensorDataset(data)):
        used: set[int] = set()
        for (batch,) in window:
            engine.backward(loss(engine.model, batch), len(batch))
            used |= storages(model)
        result = engine.step()
        used |= storages(model)
        stop = start + result.samples
        (loss(plain, data[start:stop]) / result.samples).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        start = stop % SAMPLES
        off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        seen.append((result.micro_batches, off, len(used)))
    print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
