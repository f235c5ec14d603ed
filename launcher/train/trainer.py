"""Trainer: builds engine, data and training loop of a plan, and runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from launcher.errors import EngineMisuse, TaskError, WrongCheckpoint
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.plan.run_plan import RunPlan
from launcher.rundir import code_snapshot
from launcher.rundir.fencing import Fence
from launcher.task import (
    Task,
    dataset_of,
    eval_set_text,
    eval_sets,
    file_of,
    load_task,
    seed_everything,
    train_data,
)
from launcher.tracebacks import task_method
from launcher.train import precision
from launcher.train.checkpoint import save
from launcher.train.checkpoint.load import Restored, load_newest, require_same_shards
from launcher.train.data.fingerprint import Fingerprint, other_data, require_same_data
from launcher.train.data.length_balance import arranged
from launcher.train.engine import oom
from launcher.train.engine.build import FromModel
from launcher.train.engine.engine import Engine
from launcher.train.evaluation import Evaluation
from launcher.train.optimizers import build_optimizer
from launcher.train.schedules import MakeSchedule
from launcher.train.sites import own_site
from launcher.train.training_loop import Saves, TrainingLoop
from launcher.train.world import device_of, join


def train(plan: RunPlan, stop: Callable[[], bool]) -> None:
    """Run the plan on this rank, from the newest checkpoint in the run's directory to the plan's end or until ``stop``.

    Rank 0 writes metrics.jsonl and summary.json.

    Raises:
        CheckpointFailed: a checkpoint could not be written, or before the first step there is no space for one.
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        WrongCheckpoint: the newest checkpoint does not fit this plan.
        Superseded: a newer attempt of the run has started.
    """
    world, plan = own_site(plan)
    plan.paths.root.mkdir(parents=True, exist_ok=True)  # that of a site other than the first is new
    fence = Fence.here(plan.paths)
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    submitted_plan = precision.resolve_precision(plan, world, device, plan.paths.precision)
    plan = oom.apply_stored_micro_size(submitted_plan, world)
    if world.rank == 0:
        fence.check()
        save.delete_partial(plan.paths, fence)

    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    # determined here, for the code that was just imported: its files may be edited during the run
    commit = code_snapshot.commit_of(file, plan.cluster.copies) if world.rank == 0 and (file := file_of(task)) else None
    seed_everything(plan.train.seed)  # the same initial parameters on every rank
    torch.use_deterministic_algorithms(plan.train.deterministic)
    cadence, save_failed = save.Cadence(plan.checkpoint), threading.Event()
    HEARTBEAT.beat(Phase.starting, 2)
    try:
        engine = Engine(
            task.model,
            optimizer_of(task, plan),
            plan,
            lambda: stop() or save_failed.is_set(),
            getattr(task, "shard_units", None),
            cadence.by_clock,
            owner=task,
            schedule=schedule_of(task, plan),
        )
    except EngineMisuse as error:  # of the optimizer that was passed to it
        raise TaskError(f"task._target_={plan.task.target}: optimizer(model): {error}") from error
    HEARTBEAT.beat(Phase.starting, 3)
    samples, held_out = train_data(task, plan.train.seed), eval_sets(task, plan.train.seed)
    samples = arranged(samples, task, plan, world)
    named = {eval_set_text(name): data for name, data in held_out.items()} or {eval_set_text(""): None}
    datasets = {"train_data()": dataset_of(samples), **named}
    everyone = engine.sites.whole_job()
    fingerprint = require_same_data(datasets, plan, everyone, engine.device, stored=plan.checkpoint.enabled)
    HEARTBEAT.beat(Phase.starting, 4)
    seed_everything(plan.train.seed + 1 + world.rank_in_job)  # from here on each rank draws other numbers, for dropout

    restored = load_newest(engine, plan.paths, fence, commit) if plan.checkpoint.enabled else None
    if restored is not None:
        require_same_shards(engine, restored, samples)
    changed = [] if restored is None else _changed_data(engine, restored, fingerprint, datasets)
    saves = Saves(cadence, fence, save_failed, commit)
    loop = TrainingLoop(submitted_plan, task, engine, Evaluation(engine, task, held_out), saves, restored)
    loop.totals.data = fingerprint
    if any(name in named for name in changed):
        loop.totals.forget_evaluations()
    try:
        loop.begin(restored)
        verdict = loop.run(samples)
        engine.callbacks.call("on_end", engine, verdict)
    finally:
        loop.close()
    loop.write_summary(verdict)


def _changed_data(engine: Engine, restored: Restored, fingerprint: Fingerprint, datasets: dict[str, Any]) -> list[str]:
    """Return the names of the data sets that are not those of the checkpoint. All ranks call it.

    Raises:
        WrongCheckpoint: there are some, and the user has not forced a change of the data or the task.
    """
    world, plan = engine.world, engine.plan
    before = restored.run["account"]["data"]
    found = other_data(before, fingerprint, datasets, plan, engine.device) if world.rank == 0 else []
    found = world.of_rank_0(found)
    if not found:
        return []
    lines = "; ".join(f"{name}: {difference}" for name, difference in found)
    if not any(key.startswith("task") for key in plan.forced):
        raise WrongCheckpoint(
            f"{restored.directory} was saved with other data ({lines}).\n  Restore the data that "
            f"the run had; or continue with this data from here on: `launch resume {plan.run.name} --force`."
        )
    if world.rank == 0:
        print(f"The data has changed, which was forced ({lines}): other samples are learned from here on.", flush=True)
    return [name for name, _ in found]


def optimizer_of(task: Task, plan: RunPlan) -> FromModel:
    """Return the function that makes the run's optimizer: the task's own, or that of the plan."""
    if plan.task.own_optimizer:

        def make(model: nn.Module) -> Any:
            with task_method("optimizer(model)"):
                return getattr(task, "optimizer")(model)  # noqa: B009

        return FromModel(make)
    return FromModel(lambda model: build_optimizer(model, plan.optimizer, plan.cluster.device))


def schedule_of(task: Task, plan: RunPlan) -> MakeSchedule | None:
    """Return the task's own function for the learning rate schedule; None if the plan has one."""
    if not plan.task.own_schedule:
        return None

    def make(optimizer: Optimizer, steps: int | None) -> Any:
        with task_method("schedule(optimizer, steps)"):
            return getattr(task, "schedule")(optimizer, steps)  # noqa: B009

    return make
