"""Predicted and counted bytes of many models, for test_forecast.py.

forecast_worker.py predict PLANS OVERRIDES_AS_JSON...      one process: writes a plan a line, with its forecasts
forecast_worker.py count PLANS                             run by torchrun: prints the payload that each policy sent
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch

from launcher.config.hydra import compose
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
from launcher.train.inspection.task_probe import probe
from launcher.train.optimizers import build_optimizer
from tests.helpers import inspection_of
from tests.infra.workers import leave_group, print_on_rank_0

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


def count(file: Path) -> None:
    for line in file.read_text().splitlines():
        plan = RunPlan.from_json(json.dumps(json.loads(line)["plan"]))
        sent: dict[str, int] = {}
        for sync in POLICIES[plan.strategy.kind]:
            plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, sync=sync))
            task = load_task(plan.task.target, plan.task.params, [])
            torch.manual_seed(0)
            engine = Engine(
                task.model,
                FromModel(lambda m, plan=plan: build_optimizer(m, plan.optimizer, plan.cluster.device)),
                plan,
            )
            for window in engine.windows(task.train_data()):
                for batch in window:
                    losses = as_losses(task.loss(engine.model, batch), engine.samples_in_batch, plan.task.target)
                    engine.backward(losses)
                kinds = engine.step().comm.kinds
                if engine.steps == 2:
                    break
            beside = kinds[Collective.broadcast].payload_bytes if Collective.broadcast in kinds else 0
            sent[sync.value] = sum(traffic.payload_bytes for traffic in kinds.values()) - beside
        print_on_rank_0(sent)
    leave_group()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "predict":
        warnings.simplefilter("ignore")  # as launcher.extensions.forecast.memory_forecast does when it runs by itself
        predict(place, sys.argv[3:])
    else:
        count(place)
