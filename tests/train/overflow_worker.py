"""Run by torchrun in test_overflow.py: fp16, and one number of one rank's gradients overflows in the third window."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from launcher import Engine, make_plan


def main() -> None:
    options = [
        "batch.global_size=16",
        "batch.micro_size=4",
        "train.steps=6",
        "precision=fp16",
        "precision.init_scale=8",
    ]
    plan = make_plan([*options, *sys.argv[1:], "run.calibrate=0", "train.loader_workers=0"], samples=160)
    torch.manual_seed(0)
    engine = Engine(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lambda p: torch.optim.SGD(p, 0.01), plan)
    gradients = engine.parallel.gradients
    windows = 0

    def overflowing() -> list[torch.Tensor]:
        found = gradients()
        if windows == 3 and engine.world.rank == 1:
            found[0].view(-1)[0] = torch.inf
        return found

    engine.parallel.gradients = overflowing
    seen: list[tuple[bool, float | None]] = []
    for window in engine.windows(list(torch.randn(160, 8))):
        windows += 1
        for batch in window:
            engine.backward((engine.model(batch) ** 2).sum(), len(batch))
        result = engine.step()
        seen.append((result.skipped, result.scale))
    everyone: list[object] = [None] * engine.world.size
    dist.all_gather_object(everyone, (seen, engine.precision.scaler.get_scale()))
    assert everyone[0] == everyone[1], everyone
    assert [skipped for skipped, _ in seen] == [False, False, True, False, False, False, False]
    assert [scale for _, scale in seen] == [8, 8, 8, 4, 4, 4, 4]
    print("agreed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
