"""Run by torchrun in test_save.py: the order of DDP's gradients in a checkpoint, and a save that is due by a clock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.rundir.fencing import Fence
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import load, save
from launcher.train.world import World
from tests.infra.workers import leave_group

due: list[bool] = []  # of each window, as all ranks were told


def run(engine: Engine, data: list[Tensor], until: int) -> None:
    for window in engine.windows(data):
        for batch in window:
            engine.backward((engine.model(batch) ** 2).sum(), len(batch))
        due.append(engine.step().save_due)
        if engine.steps == until:
            return


def require_no_gradient_copy(overrides: list[str]) -> None:
    """The state of a model of 1 MB takes no memory of that size, before and after DDP has rebuilt its buckets; the
    recorded order is that of the rebuilt buckets, in which the first layers come last although they are defined last.
    """

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    torch.manual_seed(1)
    model = Backwards()
    plan = make_plan([*overrides, "train.loader_workers=0", "run.calibrate_s=0", "strategy.bucket_mb=0.3"], samples=90)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), plan)
    data = list(torch.randn(90, 256))
    for steps in (1, 2):
        for window in engine.windows(data):
            for batch in window:
                engine.backward((engine.model(batch) ** 2).sum(), len(batch))
            engine.step()
            break
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            state = engine.state_dict()
        taken = [event.self_cpu_memory_usage for event in profiled.events() or () if event.self_cpu_memory_usage > 0]
        assert sum(taken) < 256 * 256, (steps, taken)
        assert state["gradient_order"] == [f"layers.{number}.weight" for number in range(4)], state["gradient_order"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    parallel: Any = engine.parallel
    buckets = parallel._ddp.reducer._get_zeros_like_grad_buckets()
    assert [names[parameter] for bucket in buckets for parameter in bucket.parameters()] == state["gradient_order"]


def resume_with_more_trained_parameters(overrides: list[str], paths: RunPaths) -> None:
    """The order of gradients in the checkpoint lacks parameters that were frozen then."""
    plan = make_plan([*overrides, "train.loader_workers=0", "run.calibrate_s=0"], samples=90)
    data, engines = list(torch.randn(90, 8)), list[Engine]()
    for frozen in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        # the ranks' clocks differ, and rank 0's is the one that counts
        engines.append(Engine(model, optimizer, plan, save_due=lambda: World.here().rank == len(due) - 1))
    run(engines[0], data, 3)
    assert due == [False, True, False]
    load.load(engines[1], save.write(save.take_snapshot(engines[0], Fence.here(paths))))
    run(engines[1], data, 6)
    assert engines[1].steps == 6


def main() -> None:
    overrides = sys.argv[2:]
    require_no_gradient_copy(overrides)
    resume_with_more_trained_parameters(overrides, RunPaths(Path(sys.argv[1])))
    leave_group()


if __name__ == "__main__":
    main()
