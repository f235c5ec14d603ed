"""precision=auto on two ranks whose devices differ, run by torchrun in test_precision_formats.py.

Each rank writes what it decided, by case, as JSON into the directory named in argv; rank 0's warnings go to its output.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher import Engine, make_plan
from launcher.config.schema import PrecisionKind
from launcher.plan.run_plan import RunPlan
from launcher.rundir.paths import RunPaths
from launcher.train import precision
from launcher.train.precision import resolve_precision
from launcher.train.world import World, device_of, join
from tests.infra.workers import leave_group

OPTIONS = ["run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "cluster.device=cpu", "train.steps=1"]


def plan_of(precision: str, place: Path) -> RunPlan:
    plan = make_plan([*OPTIONS, f"precision={precision}"], samples=64)
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, dir=str(place)))
    return plan.with_precision(PrecisionKind(precision), "")  # as where the hosts are not known before the start


def main() -> None:
    place, world = Path(sys.argv[1]), dataclasses.replace(World.here(), local_rank=0)  # as on two hosts
    device = torch.device("cpu")
    found: dict[str, Any] = {}
    join(world, device, None)

    def set_devices(*natives: bool) -> None:
        precision._warned.clear()  # pyright: ignore[reportPrivateUsage]
        precision.is_native = lambda kind, _: kind is PrecisionKind.fp32 or natives[world.rank]

    def decide(name: str, precision: str, *natives: bool, keep: bool = True) -> None:
        set_devices(*natives)
        if world.rank == 0:
            print(f"case {name}", flush=True)
        paths = RunPaths(place / f"host{world.rank}" / name)
        paths.root.mkdir(parents=True, exist_ok=True)
        plan = plan_of(precision, paths.root)
        plan.save()
        plan = resolve_precision(RunPlan.load(paths.plan), world, device, paths.precision if keep else None)
        later = RunPlan.load(paths.plan).precision
        found[name] = [plan.precision.kind.value, plan.precision.reason, later.kind.value, later.reason]

    decide("all native", "auto", True, True)
    decide("one emulates", "auto", True, False)
    decide("without a record", "auto", True, True, keep=False)
    # each host has a directory of its own, and rank 1's joined later: it has no record
    earlier = RunPaths(place / f"host{world.rank}" / "joined").precision
    if world.rank == 0:
        earlier.parent.mkdir(parents=True)
        earlier.write_text(json.dumps({"kind": "bf16", "reason": "auto: decided earlier"}))
    decide("joined", "auto", False, False)
    decide("explicit", "fp16", True, False)
    decide("fp32", "fp32", False, False)
    set_devices(True, False)
    model = nn.Linear(4, 2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan_of("auto", place))
    formats: list[str] = []
    for window in engine.windows(list(torch.ones(64, 4))):
        for batch in window:
            with engine.precision.autocast():
                formats.append(str(nn.functional.linear(batch, model.weight).dtype))
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
    found["own loop"] = [engine.plan.precision.kind.value, *sorted(set(formats))]
    (place / f"rank{world.rank}.json").write_text(json.dumps(found))
    assert device_of(world, engine.plan.cluster.device) == device
    leave_group()


if __name__ == "__main__":
    main()
