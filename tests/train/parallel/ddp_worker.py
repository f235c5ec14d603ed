"""Windows of different numbers of micro-batches under DDP, run by test_ddp.py on two ranks.

Arguments: the number of samples, the index of the window after which a pass without collectives runs (-1: none), and
overrides.

Prints one JSON object from rank 0. Of each window: the number of micro-batches, how far the parameters are from those
of plain torch after it, how many storages held the gradients in it, those until the next window included, the payload
of each kind of collective, their number, and the bytes that they save.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from launcher import Engine, make_plan
from tests.infra.workers import leave_group, print_on_rank_0


def storages(model: nn.Module) -> set[int]:
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}


def main() -> None:
    samples, silent_after, overrides = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    plan = make_plan(
        ["strategy=ddp", "batch.micro_size=2", "train.shuffle=false", "train.loader_workers=0", "schedule=constant",
         "schedule.warmup_steps=0", "cluster.device=cpu", "precision=fp32", "cluster.workers_per_node=2", *overrides],
        samples=samples,
    )  # fmt: skip
    torch.manual_seed(0)
    model, plain, data = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(samples, 8)
    plain.load_state_dict(model.state_dict())
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).square().sum()

    seen: list[Any] = []
    start = 0
    for window in engine.windows(TensorDataset(data)):
        used: set[int] = set()
        for (batch,) in window:
            engine.backward(loss(engine.model, batch), len(batch))
            used |= storages(model)
        result = engine.step()
        used |= storages(model)
        if len(seen) == silent_after:
            with engine.parallel.without_collectives():
                loss(engine.model, data[:2]).backward()
                used |= storages(model)
        stop = start + result.samples
        (loss(plain, data[start:stop]) / result.samples).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        start = stop % samples
        off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        comm = result.comm
        sent = [[traffic.payload_bytes for traffic in comm.kinds.values()], comm.collectives]
        seen.append((result.micro_batches, off, len(used), *sent, comm.wire_bytes_every - comm.wire_bytes))
    print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
