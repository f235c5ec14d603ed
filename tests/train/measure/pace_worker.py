"""Trains a small model with a rank 1 that is slow in one way or another; rank 0 prints who was named."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.train.engine.engine import Engine
from launcher.train.metrics import step_metrics
from tests.helpers import make_plan
from tests.infra.workers import leave_group, print_on_rank_0

STEPS, SLEEP_S = 32, 0.02
# The delays of a window take at least so many times as long as the rest of the window before: their share of a step
# does not fall on a busy machine, where passes, gathers and waits for the other rank take longer.
TIMES = 4
CASES = {
    "computes": [],
    "reads": [],
    "computes, every": ["strategy.sync=every"],
    "computes, fsdp": ["strategy=fsdp"],
    "computes, events": ["batch.micro_size=8"],  # one micro-batch, which is enough and takes the least time
}


class Event:
    """Event of a GPU, recorded by the host's clock."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._at = math.nan

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return not math.isnan(self._at)

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds, as of GPUs."""
        return 1e3 * (end._at - self._at)


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, sleep_s: Callable[[], float]) -> None:
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return 16 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._sleep_s())
        return torch.full((8,), index / len(self))


def train(name: str, overrides: list[str]) -> dict[str, Any]:
    batch = ["batch.global_size=16", "batch.micro_size=2", "train.loader_workers=0", "run.calibrate_s=0"]
    # so much that the noise of a machine that has other things to do stays below it
    share = ["precision=fp32", f"train.steps={STEPS}", "train.straggler_share=0.6"]
    plan = make_plan(*batch, *share, *overrides, samples=16 * STEPS)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan, shard_units=lambda model: [model[0]])
    slow, rest_s = dist.get_rank() == 1, 0.0

    def delay_s() -> float:
        """Return the delay of a micro-batch on the slow rank."""
        return max(2 * SLEEP_S, TIMES * rest_s / plan.batch.accumulation) if slow else 0.0

    if "events" in name:  # the meter of a GPU, where the host's clock says nothing about collectives
        torch.cuda.Event = Event  # type: ignore[misc]
        engine.parallel.meter._cuda = True
    said: list[str] = []
    first, metrics = None, dict[str, float]()
    started = time.perf_counter()
    for window in engine.windows(Samples(lambda: delay_s() / 2 if name == "reads" else 0.0)):
        delays_s = plan.batch.accumulation * delay_s()
        for data in window:
            if "computes" in name:
                time.sleep(delay_s())
            engine.backward(engine.model(data).square().sum(), len(data))
        result = engine.step()
        rest_s, started = max(0.0, time.perf_counter() - started - delays_s), time.perf_counter()
        if engine.stragglers.news is not None:
            said.append(engine.stragglers.news)
            first = first or result.step
        metrics = step_metrics(result, plan, (engine.samples, engine.items), 1.0) | engine.metrics()
    named = engine.stragglers.named
    return {
        "named": None if named is None else [named.rank, named.of],
        "said": said,
        "slow": engine.stragglers.slow,
        "first": first,
        "metrics": sorted(metrics),
    }


def main() -> None:
    for name, overrides in CASES.items():
        seen = train(name, overrides)
        print_on_rank_0({name: seen})
    leave_group()


if __name__ == "__main__":
    main()
