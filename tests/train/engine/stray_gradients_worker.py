"""A loop that runs backward passes of its own before, between and in windows; run by torchrun.

argv: STRATEGY/SYNC, several. Rank 0 prints how far the parameters are from those of plain torch on one big batch.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from tests.infra.workers import flat, leave_group, print_on_rank_0

DATA = list(torch.randn(48, 5, generator=torch.Generator().manual_seed(3)))
STEPS = 3


def reference(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):  # a window is an epoch, so the order of the samples does not matter
        optimizer.zero_grad()
        model(torch.stack(DATA)).square().mean(0).sum().backward()
        optimizer.step()
    return flat(model.parameters())


def error(policy: str) -> float:
    strategy, sync = policy.split("/")
    plan = make_plan(
        [
            "batch.global_size=48", "batch.micro_size=8", f"train.steps={STEPS}", "cluster.device=cpu",
            "precision=fp32", "train.loader_workers=0", "run.calibrate_s=0", "train.clip_norm=null",
            "schedule=constant", f"strategy={strategy}", f"strategy.sync={sync}",
        ],
        samples=len(DATA),
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = reference(copy.deepcopy(model))
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.1), plan)

    def stray() -> None:  # such as a warm-up, a sanity check, or a loss of another model
        for _ in range(2):
            (1e3 * engine.model(torch.ones(3, 5)).square().sum()).backward()

    stray()
    for window in engine.windows(DATA):
        stray()
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
        stray()
    return (flat(engine.model.parameters()) - expected).abs().max().item()


def main() -> None:
    print_on_rank_0({policy: error(policy) for policy in sys.argv[1:]})
    leave_group()


if __name__ == "__main__":
    main()
