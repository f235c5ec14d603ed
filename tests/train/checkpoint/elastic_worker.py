"""Run by torchrun in test_elastic.py: argv[1] is a file of jobs, one JSON object a line, run one after the other.

Of each job: ``run`` (its directory), ``overrides``, ``task``; if they are there: ``stop``: windows after which it ends;
``raises``: the error that it must end with; ``forced``: keys; ``reads``: a checkpoint that is loaded, and no more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import RunError
from launcher.plan.batch import RampStage
from launcher.plan.run_plan import RunPlan
from launcher.task import Task
from launcher.train import trainer, training_loop
from launcher.train.checkpoint import load
from launcher.train.engine import calibration
from launcher.train.engine.engine import Engine
from launcher.train.engine.window import Stage
from launcher.train.world import World
from tests.helpers import make_plan
from tests.infra.workers import leave_group
from tests.train.checkpoint.elastic_task import Words

torch.set_num_threads(1)
calibration.MAX_ROUNDS = 3


def plan_of(job: dict[str, Any]) -> RunPlan:
    plan = make_plan(
        *job["overrides"], f"cluster.workers_per_node={World.here().size}", run_dir=job["run"],
        samples=None if job["task"].get("streams") else job["task"].get("samples", 90),
    )  # fmt: skip
    task = dataclasses.replace(plan.task, target="tests.train.checkpoint.elastic_task.Words", params=job["task"])
    ramp = tuple(RampStage(windows=windows, global_size=size) for windows, size in job.get("past", []))
    batch = dataclasses.replace(plan.batch, ramp=ramp)
    return dataclasses.replace(plan, task=task, batch=batch, forced=tuple(job.get("forced", ())))


def note_samples(job: dict[str, Any]) -> None:
    """Write the samples that count in each window, one line for each micro-batch and one file for each rank."""
    inner = getattr(training_loop.losses_of, "inner", training_loop.losses_of)
    file = Path(job["run"]) / f"seen.{World.here().rank}"

    def noted(task: Task, engine: Engine, model: Any, batch: Tensor) -> Any:
        running = engine._current.stage is Stage.running  # pyright: ignore[reportPrivateUsage]
        trains = engine.samples_in_batch and running and torch.is_grad_enabled()  # not in the trial of the loss
        samples = batch[:, 0].tolist() if trains else []
        with file.open("a") as out:
            out.write(json.dumps([engine.window_index, samples]) + "\n")
        return inner(task, engine, model, batch)

    noted.inner = inner  # pyright: ignore[reportFunctionMemberAccess]
    training_loop.losses_of = noted


def read(job: dict[str, Any]) -> None:
    """Write PowerSGD's residue after a load, summed over ranks; print random numbers and rates."""
    plan = plan_of(job)
    engine = Engine(Words().model, trainer.optimizer_of(Words(), plan), plan)
    restored = load.load(engine, Path(job["reads"]))
    state = engine.parallel.state_dict()
    sums = {name: residue.clone() for name, residue in state.get("residue", {}).items()}
    if engine.world.size > 1:
        for residue in sums.values():
            dist.all_reduce(residue)
    torch.save({"sums": sums, "factors": state.get("factors", {})}, Path(job["run"]) / f"memory.{engine.world.rank}")
    random = torch.rand(4).tolist()
    everyone = engine.world.of_all(random)
    if engine.world.rank == 0:
        group = {name: value for name, value in engine.optimizer.param_groups[0].items() if name != "params"}
        rates = {"base_lr": engine.schedule.base_lrs[0], "betas": group["betas"], "eps": group["eps"]}
        print(json.dumps({"ranks": restored.ranks, "random": everyone, **rates}), flush=True)


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        job = json.loads(line)
        Path(job["run"]).mkdir(exist_ok=True)
        asked = 0

        def stop(job: dict[str, Any] = job) -> bool:
            nonlocal asked
            asked += 1
            return asked == job.get("stop")

        os.environ["LAUNCHER_INCARNATION"] = "0.0"
        note_samples(job)
        try:
            read(job) if "reads" in job else trainer.train(plan_of(job), stop)
        except RunError as error:
            if type(error).__name__ != job.get("raises"):
                raise
            if World.here().rank == 0:
                print(f"{type(error).__name__} at {job['run']}: {error}", flush=True)
        else:
            assert "raises" not in job, f"{job['run']} went on"
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main()
