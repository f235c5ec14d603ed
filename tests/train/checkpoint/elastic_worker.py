"""Run by torchrun in test_load_elastic.py: jobs as those of resume_worker.py, whose samples are noted.

If a job has ``reads``: that checkpoint is loaded, and no more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.task import Task
from launcher.train import trainer, training_loop
from launcher.train.checkpoint import load
from launcher.train.engine.engine import Engine
from launcher.train.engine.window import Stage
from launcher.train.world import World
from tests.train.checkpoint.elastic_task import Words
from tests.train.checkpoint.resume_worker import plan_of, run_all, train_job


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


def run(job: dict[str, Any]) -> None:
    note_samples(job)
    read(job) if "reads" in job else train_job(job)


if __name__ == "__main__":
    run_all(run)
