"""Predicted and counted bytes of many models, and peaks of memory, for test_memory_forecast.py.

forecast_worker.py predict PLANS OVERRIDES_AS_JSON...      one process: writes a plan a line, with its forecasts
forecast_worker.py count PLANS                             run by torchrun: prints the payload that each policy sent
forecast_worker.py peaks PLAN PREDICTED_AS_JSON            run by torchrun: prints the peak of each policy's windows
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from launcher.config.hydra import compose
from launcher.config.schema import Sync
from launcher.extensions.forecast.memory_forecast import forecast
from launcher.loss import as_losses
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import NoForecast, RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.sync_policy import POLICIES, SHARDED, Collective
from launcher.task import load_task
from launcher.train.engine.build import FromModel
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.inspection.task_probe import probe
from launcher.train.optimizers import build_optimizer
from tests.helpers import inspection_of
from tests.infra.workers import leave_group, print_on_rank_0

TOLERANCE = 0.05  # relative, of a predicted peak
TASK = "tests.extensions.forecast.forecast_tasks.Task"
RUN = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")


def predict(file: Path, cases: list[str]) -> None:
    lines: list[str] = []
    for case in cases:
        overrides, params = json.loads(case)
        task = TaskPlan(**probe(inspection_of(TASK, "strategy=fsdp", **params)))
        plan = solve(compose(overrides), Site(gpus=0, cores=2, cwd="/nowhere"), task, RUN)
        found = forecast(plan) if plan.strategy.kind in SHARDED else plan.strategy.forecasts
        problem, found = (found.reason, found.traffic) if isinstance(found, NoForecast) else (None, found)
        fields = {
            "plan": json.loads(plan.to_json()),
            "problem": problem,
            "predicted": {each.sync.value: each.payload_bytes for each in found},
            "peaks": [each.peak_bytes for each in found],
            "arithmetic": {each.sync.value: each.payload_bytes for each in plan.strategy.forecasts},
        }
        lines.append(json.dumps(fields))
    file.write_text("\n".join(lines))


def run_windows(
    plan: RunPlan, sync: Sync, prepare: Callable[[Engine], object], before: Callable[[], object]
) -> StepResult:
    """Run two windows of a plan's task under a policy: the optimizer's state exists from the second one on.

    Args:
        prepare: called with the engine, when the data exist.
        before: called before each micro-batch.
    """
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, sync=sync))
    task = load_task(plan.task.target, plan.task.params, [])
    torch.manual_seed(0)
    optimizer = FromModel(lambda m: build_optimizer(m, plan.optimizer, plan.cluster.device))
    engine = Engine(task.model, optimizer, plan, shard_units=getattr(task, "shard_units", None))
    data = task.train_data()
    prepare(engine)
    for window in engine.windows(data):
        for batch in window:
            before()
            engine.backward(as_losses(task.loss(engine.model, batch), engine.samples_in_batch, plan.task.target))
        result = engine.step()
        if engine.steps == 2:
            return result
    raise AssertionError("the data end before the second window")


def count(file: Path) -> None:
    for line in file.read_text().splitlines():
        plan = RunPlan.from_json(json.dumps(json.loads(line)["plan"]))
        sent: dict[str, int] = {}
        for sync in POLICIES[plan.strategy.kind]:
            kinds = run_windows(plan, sync, lambda _: None, lambda: None).comm.kinds
            beside = kinds[Collective.broadcast].payload_bytes if Collective.broadcast in kinds else 0
            sent[sync.value] = sum(traffic.payload_bytes for traffic in kinds.values()) - beside
        print_on_rank_0(sent)


def peak(plan: RunPlan, sync: Sync) -> int:
    """Return the peak by torch's memory tracker, without the data, which are not part of what is predicted."""
    tracker = MemTracker()
    with ExitStack() as stack:

        def track(engine: Engine) -> None:
            tracker.track_external(engine.parallel.module, engine.optimizer)
            stack.enter_context(tracker)

        run_windows(plan, sync, track, tracker.reset_mod_stats)
    return next(sizes["Total"] for place, sizes in tracker.get_tracker_snapshot("peak").items() if place.type == "cpu")


def undisturbed_peak(plan: RunPlan, sync: Sync, predicted: int) -> int:
    """Measure the peak, and once more if it is above the prediction on any rank: on a loaded machine a thread of gloo
    may hold a buffer for longer."""
    found = peak(plan, sync)
    above = torch.tensor(int(found > (1 + TOLERANCE) * predicted))
    dist.all_reduce(above)
    return min(found, peak(plan, sync)) if above else found


def peaks(plan: RunPlan, predicted: dict[str, int]) -> None:
    syncs = POLICIES[plan.strategy.kind]
    print_on_rank_0({sync.value: undisturbed_peak(plan, sync, predicted[sync.value]) for sync in syncs})


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "predict":
        warnings.simplefilter("ignore")  # as launcher.extensions.forecast.memory_forecast does when it runs by itself
        predict(place, sys.argv[3:])
    elif sys.argv[1] == "count":
        count(place)
        leave_group()
    else:
        peaks(RunPlan.load(place), json.loads(sys.argv[3]))
        leave_group()
