"""What surrounds the steps of a training run: build, evaluate, record, save, stop, sum up."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from launcher import snapshot
from launcher.config import Device, OnOom, OptimizerKind
from launcher.errors import CheckpointFailed, DataError, RecordFailed, TaskError
from launcher.incarnation import Fence
from launcher.paths import write_json
from launcher.plan import OptimizerPlan, RunPlan
from launcher.progress import PULSE, Phase
from launcher.train import checkpoint, fit, resume, room
from launcher.train.account import Account
from launcher.train.engine import Engine
from launcher.train.held_out import eval_batches
from launcher.train.randomness import seed_everything
from launcher.train.saver import Saver
from launcher.train.step import StepResult, require_sum
from launcher.train.task import Loss, Task, eval_data, file_of, load_task
from launcher.train.telemetry import (
    Metrics,
    NoRecord,
    Sink,
    as_record,
    peak_flops,
    peak_memory_bytes,
    step_metrics,
)
from launcher.train.world import World, device_of, join


def train(plan: RunPlan, stop: Callable[[], bool]) -> None:
    """Run the plan on this rank, to its end or until ``stop``, from the newest checkpoint in the run's directory on.

    Rank 0 writes metrics.jsonl and summary.json.

    Raises:
        CheckpointFailed: one could not be written, or there is no room for one before the first step.
        NoGoodCheckpoint: all that there are are damaged.
        WrongCheckpoint: the newest one is not of this plan.
        Superseded: a newer incarnation of the run has begun.
    """
    world, fence = World.here(), Fence.here(plan.paths)
    join(world, device_of(world, plan.cluster.device), plan.train.hang_timeout)
    asked, plan = plan, fit.fitted(plan, world)
    if world.rank == 0:
        resume.begin(plan.paths, fence)
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from)
    # of what was just imported: it may be edited while the run goes on
    commit = snapshot.commit_of(file, plan.cluster.copies) if world.rank == 0 and (file := file_of(task)) else None
    seed_everything(plan.train.seed)  # the same initial parameters on every rank
    torch.use_deterministic_algorithms(plan.train.deterministic)
    cadence, trouble = checkpoint.Cadence(plan.checkpoint), threading.Event()
    PULSE.beat(Phase.starting, 2)
    engine = Engine(
        task.model,
        lambda parameters: build_optimizer(parameters, plan.optimizer, plan.cluster.device),
        plan,
        lambda: stop() or trouble.is_set(),
        getattr(task, "shard_units", None),
        cadence.by_clock,
    )
    seed_everything(plan.train.seed + 1 + world.rank)  # but dropout of its own
    PULSE.beat(Phase.starting, 3)
    samples = task.train_data()  # before the checkpoint is loaded: making data may draw random numbers
    PULSE.beat(Phase.starting, 4)
    resumed = resume.go_on(engine, plan.paths, fence, commit) if plan.checkpoint.enabled else None
    account, last = Account(plan, engine, commit=commit), None
    if resumed is not None:
        resume.require_same_shards(engine, resumed, samples)
        account.go_on(resumed.restored)
        account.checkpoint, last = str(resumed.directory), resumed.restored.run["record"]
    if plan.checkpoint.enabled:
        room.require(engine, plan.paths.checkpoints, has_one=resumed is not None)
    saver = Saver(engine, account, fence, trouble)
    run = _Run(asked, task, engine, NoRecord(), account, cadence, saver, recorded=engine.steps if last else None)
    owed = run.owed(last)
    if world.rank == 0:
        run.record = resume.open_record(plan, fence, engine.steps, last and last | owed, amended=bool(owed))
    try:
        verdict = run.steps(samples)
    finally:
        saver.finish()
        run.record.close()
    if world.rank == 0:
        fence.check()
        write_json(plan.paths.summary, account.summary(verdict))


def build_optimizer(parameters: Iterable[nn.Parameter], plan: OptimizerPlan, device: Device) -> Optimizer:
    if plan.kind is OptimizerKind.sgd:
        return SGD(parameters, plan.lr, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=plan.weight_decay)
    fused = device is Device.cuda
    return AdamW(parameters, plan.lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay, fused=fused)


def loss_and_items(task: Task, engine: Engine, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int | Tensor]:
    """Of the micro-batch under way: its sum, and what it is a sum over."""
    loss = as_loss(task.loss(model, batch), engine.samples_in_batch, engine.plan.task.target)
    return loss.total, loss.items


def as_loss(value: Loss | Tensor, samples: int, target: str) -> Loss:
    """A task's answer as a sum and a count. A bare tensor is taken for a mean over samples, with a warning.

    Raises:
        TaskError: it is neither.
    """
    if isinstance(value, Loss):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        warnings.warn(
            f"{target}.loss returned a bare tensor: taken for the mean over the micro-batch's samples. Where the items "
            "are tokens, return launcher.Loss(total=sum over tokens, items=number of tokens) for the exact average.",
            stacklevel=1,
        )
        return Loss(total=value.reshape(()) * samples, items=samples)
    raise TaskError(
        f"task._target_={target}: loss() returned a {type(value).__name__}.\n"
        "  Return launcher.Loss(total=sum over items, items=how many), or a scalar tensor: the mean over samples."
    )


@dataclass
class _Run:
    plan: RunPlan
    task: Task
    engine: Engine
    record: Sink
    account: Account
    cadence: checkpoint.Cadence
    saver: Saver
    recorded: int | None = None

    def __post_init__(self) -> None:
        self.samples_per_s_at_peak: float | None = None
        peak, flops = peak_flops(self.engine.device), getattr(self.task, "flops_per_sample", None)
        if peak is not None and flops is not None:
            self.samples_per_s_at_peak = peak * self.engine.world.size / flops()

    def steps(self, samples: Any) -> str:
        """To the end of the plan's steps, or to a stop; the verdict."""
        engine = self.engine
        self.cadence.start_clock()
        for window in engine.windows(samples, getattr(self.task, "collate", None), self.loss):
            try:
                for batch in window:
                    engine.backward(*self.loss(engine.model, batch))
            except Exception as error:
                self.require_room(error)
                continue
            with self.out_of_memory("while the optimizer took its step, whose state has to fit, too"):
                result = engine.step()
            self.account.take_in(result)
            if result.skipped and engine.world.rank == 0:
                why = f"fp16 overflowed at loss scale {result.scale}" if result.items else "the window holds no item"
                print(f"step {engine.steps + 1}: skipped, {why}", flush=True)
            if engine.pace.news is not None and engine.world.rank == 0:
                print(f"step {engine.steps}: {engine.pace.news}", flush=True)
            metrics = self.metrics(result)
            evaluated: Metrics = {}
            if self.eval_due(result):
                with self.out_of_memory("while the held-out data was evaluated"):
                    evaluated = self.evaluate()
            saves = self.save_due(result)
            try:
                saved = self.save(result, metrics | evaluated) if saves else {}
            except CheckpointFailed:
                if not (result.skipped and result.step == self.recorded):
                    with suppress(RecordFailed):  # the disk is full: it has been said
                        self.record.write(result.step, metrics | evaluated)
                raise
            if self.log_due(result, extra=bool(evaluated) or saves):
                self.record.write(result.step, metrics | evaluated | saved | self.saver.news())
                self.recorded = result.step
            if result.stopped:
                return "stopped"
        return "done"

    def require_room(self, error: Exception) -> None:
        """Return where the window that raised is run again, with smaller micro-batches."""
        engine, batch = self.engine, self.engine.plan.batch
        if engine.shrinks(error):
            if engine.world.rank == 0:
                fit.note(self.plan, engine.plan.batch)
                print(f"step {engine.steps + 1}: out of memory. From here on: {engine.plan.batch.words}", flush=True)
            return
        if not fit.is_out_of_memory(error):
            raise error
        if batch.on_oom is OnOom.shrink and (smaller := batch.shrunk()) is not None:
            fit.note(self.plan, smaller)
        raise fit.out_of_memory(error, batch, engine.world.rank, engine.steps + 1) from None

    @contextmanager
    def out_of_memory(self, when: str) -> Iterator[None]:
        """Around what smaller micro-batches may not help: said in plain words, and nothing is learned from it."""
        try:
            yield
        except Exception as error:
            if not fit.is_out_of_memory(error):
                raise
            raise fit.out_of_memory_beside(error, self.engine.world.rank, self.engine.steps + 1, when) from None

    def loss(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int | Tensor]:
        return loss_and_items(self.task, self.engine, model, batch)

    def eval_due(self, result: StepResult) -> bool:
        every = self.plan.train.eval_every
        if result.last:
            return not result.stopped
        return bool(every) and not result.skipped and result.step % every == 0

    def owed(self, last: dict[str, Any] | None) -> Metrics:
        """The evaluation of the step that the run goes on from, where a stop was in a hurry and left it out. ``last``:
        the record of that step."""
        every = self.plan.train.eval_every
        if last is None or not every or last["step"] % every or "eval/loss" in last:
            return {}
        return self.evaluate()

    def save_due(self, result: StepResult) -> bool:
        if not self.plan.checkpoint.enabled or not self.engine.steps:  # of no step there is nothing to save
            return False
        return result.last or (not result.skipped and self.cadence.due(result))

    def metrics(self, result: StepResult) -> Metrics:
        engine = self.engine
        seen, peak = (engine.samples, engine.items), peak_memory_bytes(engine.device)
        metrics = step_metrics(result, engine.plan, seen, self.account.total_s, peak)
        metrics["batch/empty_windows"] = engine.empty_windows
        if engine.precision.scales:
            metrics["amp/skipped_steps"] = engine.skipped_steps
        if self.samples_per_s_at_peak is not None:
            metrics["throughput/mfu"] = metrics["throughput/samples_per_s"] / self.samples_per_s_at_peak
        return metrics

    def log_due(self, result: StepResult, *, extra: bool) -> bool:
        # a skipped window is no step, so there is no record of one: the counters of the next record have it
        if result.skipped and (not result.last or result.step == self.recorded):
            return False
        return bool(extra or result.calibrated or result.last or result.step % self.plan.train.log_every == 0)

    def save(self, result: StepResult, metrics: Metrics) -> Metrics:
        """``metrics``: of this very step. They are recorded after the checkpoint, and would be lost in between."""
        began = time.perf_counter()
        PULSE.beat(Phase.saving)
        self.engine.share_buffers()
        self.record.sync()
        again = None if result.last else self.cadence.next(result.step)
        self.saver.save(as_record(result.step, metrics), again=again)
        self.cadence.start_clock()
        return {"time/checkpoint_s": time.perf_counter() - began}

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Mean loss over the items of the held-out data; nothing where the task has none."""
        data = eval_data(self.task)
        if data is None:
            return {}
        engine, module = self.engine, self.engine.parallel.module
        PULSE.beat(Phase.evaluating)
        engine.share_buffers()
        training = [part for part in module.modules() if part.training]  # a task may keep some of them in eval mode
        module.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
        batches = eval_batches(data, engine.plan, engine.world, engine.device, getattr(self.task, "collate", None))
        with engine.parallel.evaluation():
            for number, batch in enumerate(batches, 1):
                PULSE.beat(Phase.evaluating, number)
                with engine.precision.autocast():
                    loss = as_loss(self.task.loss(module, batch.data), batch.samples, self.plan.task.target)
                require_sum(loss.total, loss.items)
                if batch.samples:
                    totals[0] += loss.total.double()
                    totals[1] += loss.items
        for part in training:
            part.training = True
        if engine.world.size > 1:
            dist.all_reduce(totals)
        loss_sum, items = totals.tolist()
        if not items > 0:
            raise DataError(
                "eval_data() holds no item: there is nothing to evaluate on.\n  Return None to have no evaluation."
            )
        loss = loss_sum / items
        self.account.evaluated = True
        self.account.eval_loss = loss if math.isfinite(loss) else None
        return {"eval/loss": loss}
