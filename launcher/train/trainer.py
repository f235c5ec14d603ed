"""Trainer: builds the engine, and runs a plan's steps with evaluation, record, checkpoints, stop and summary."""

from __future__ import annotations

import itertools
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

from launcher.config.schema import Device, OnOom, OptimizerKind
from launcher.errors import DataError, RecordFailed, TaskError
from launcher.heartbeat import PULSE, Phase, Role
from launcher.plan.run_plan import OptimizerPlan, RunPlan
from launcher.rundir import code_snapshot
from launcher.rundir.fencing import Fence
from launcher.rundir.files import write_json
from launcher.task import Loss, Task, eval_data, file_of, is_mapped, load_task, seed_everything, train_data
from launcher.train import precision
from launcher.train.checkpoint import save as checkpoint_save
from launcher.train.checkpoint.async_save import Saver
from launcher.train.checkpoint.load import load_newest, require_same_shards
from launcher.train.checkpoint.run_totals import RunTotals
from launcher.train.data.fingerprint import require_same_data
from launcher.train.engine import oom
from launcher.train.engine.engine import Engine
from launcher.train.engine.preserved_state import KeptAttributes
from launcher.train.engine.window_totals import StepResult, require_sum
from launcher.train.evaluation import eval_batches, evaluation, named_as_held_out
from launcher.train.measure.flops import peak_flops
from launcher.train.metrics import (
    Metrics,
    NoRecord,
    Sink,
    as_record,
    open_record,
    peak_memory_bytes,
    read_record,
    step_metrics,
)  # fmt: skip
from launcher.train.world import World, device_of, join


def train(plan: RunPlan, stop: Callable[[], bool]) -> None:
    """Run the plan on this rank, from the newest checkpoint in the run's directory to the plan's end or until ``stop``.

    Rank 0 writes metrics.jsonl and summary.json.

    Raises:
        CheckpointFailed: a checkpoint could not be written, or before the first step there is no room for one.
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        WrongCheckpoint: the newest checkpoint does not fit this plan.
        Superseded: a newer attempt of the run has started.
    """
    world, fence = World.here(), Fence.here(plan.paths)
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    plan = precision.decided(plan, world, device, plan.paths.precision)
    asked, plan = plan, oom.fitted(plan, world)
    if world.rank == 0:
        fence.check()
        checkpoint_save.delete_partial(plan.paths, fence)
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    # now, for the code that was just imported: its files may be edited during the run
    commit = code_snapshot.commit_of(file, plan.cluster.copies) if world.rank == 0 and (file := file_of(task)) else None
    seed_everything(plan.train.seed)  # the same initial parameters on every rank
    torch.use_deterministic_algorithms(plan.train.deterministic)
    cadence, trouble = checkpoint_save.Cadence(plan.checkpoint), threading.Event()
    PULSE.beat(Phase.starting, 2)
    engine = Engine(
        task.model,
        lambda parameters: build_optimizer(parameters, plan.optimizer, plan.cluster.device),
        plan,
        lambda: stop() or trouble.is_set(),
        getattr(task, "shard_units", None),
        cadence.by_clock,
        owner=task,
    )
    PULSE.beat(Phase.starting, 3)
    samples, held_out = train_data(task, plan.train.seed), eval_data(task, plan.train.seed)
    require_same_data({"train_data()": samples, "eval_data()": held_out}, plan, world, engine.device)
    PULSE.beat(Phase.starting, 4)
    seed_everything(plan.train.seed + 1 + world.rank)  # from here on each rank draws other numbers, for dropout
    resumed = load_newest(engine, plan.paths, fence, commit) if plan.checkpoint.enabled else None
    account, last = RunTotals(engine, commit), None
    if resumed is not None:
        require_same_shards(engine, resumed, samples)
        account.restore(resumed)
        last = resumed.run["record"]
    if plan.checkpoint.enabled:
        checkpoint_save.require_writable(engine, plan.paths.checkpoints, resumed=resumed is not None)
    saver = Saver(engine, account, fence, trouble)
    run = _Run(
        asked, task, held_out, engine, NoRecord(), account, cadence, saver, recorded=engine.steps if last else None
    )
    if resumed is None:
        run.try_evaluation()
    owed = run.owed(last)
    if world.rank == 0:
        run.record = open_record(plan, fence, engine.steps, last and last | owed, amended=bool(owed))
    try:
        verdict = run.steps(samples)
    finally:
        saver.finish()
        run.record.close()
    if world.rank == 0:
        fence.check()
        write_json(plan.paths.summary, account.summary(verdict))


def build_optimizer(parameters: Iterable[nn.Parameter], plan: OptimizerPlan, device: Device) -> Optimizer:
    """Return the plan's optimizer of ``parameters``; AdamW is fused on GPUs."""
    if plan.kind is OptimizerKind.sgd:
        return SGD(parameters, plan.lr, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=plan.weight_decay)
    fused = device is Device.cuda
    betas = (plan.betas[0], plan.betas[1])
    return AdamW(parameters, plan.lr, betas=betas, eps=plan.eps, weight_decay=plan.weight_decay, fused=fused)


def loss_and_items(task: Task, engine: Engine, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int | Tensor]:
    """Return (loss_sum, num_items) of the current micro-batch."""
    loss = as_loss(task.loss(model, batch), engine.samples_in_batch, engine.plan.task.target)
    return loss.total, loss.items


def as_loss(value: Loss | Tensor, samples: int, target: str) -> Loss:
    """Convert the result of a task's loss to a ``Loss``. A scalar tensor is taken as a mean over samples, with a
    warning.

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
    held_out: Any
    engine: Engine
    record: Sink
    account: RunTotals
    cadence: checkpoint_save.Cadence
    saver: Saver
    recorded: int | None = None

    def __post_init__(self) -> None:
        own: Callable[[], float] | None = getattr(self.task, "flops_per_sample", None)
        self.flops_per_sample = self.plan.task.flops_per_sample if own is None else own()
        self.peak_flops: float | None = None
        if self.engine.device.type == "cuda":
            name, tf32 = torch.cuda.get_device_name(self.engine.device), torch.backends.cuda.matmul.fp32_precision
            self.peak_flops = peak_flops(name, self.plan.precision.kind, tf32=tf32 == "tf32")

    def steps(self, samples: Any) -> str:
        """Run the remaining steps of the plan, and return the verdict: done or stopped."""
        engine = self.engine
        self.cadence.start_clock()
        collate, compare = getattr(self.task, "collate", None), not is_mapped(samples)  # mapped data was compared
        for window in engine.windows(samples, collate, self.loss, compare_data=compare):
            try:
                for batch in window:
                    engine.backward(*self.loss(engine.model, batch))
            except Exception as error:
                self.require_room(error)
                continue
            with self.out_of_memory("while the optimizer took its step, whose state has to fit, too"):
                result = engine.step()
            self.account.add(result)
            if result.skipped and engine.world.rank == 0:
                why = f"fp16 overflowed at loss scale {result.scale}" if result.items else "the window holds no item"
                print(f"step {engine.steps + 1}: skipped, {why}", flush=True)
            if engine.stragglers.news is not None and engine.world.rank == 0:
                print(f"step {engine.steps}: {engine.stragglers.news}", flush=True)
            metrics, saves, evaluates = self.metrics(result), self.save_due(result), self.eval_due(result)
            try:  # save before the evaluation: an error in the evaluation must not lose the steps so far
                if saves:
                    metrics |= self.save(result, metrics)
                if evaluates:
                    with self.out_of_memory("while the held-out data was evaluated"):
                        metrics |= self.evaluate()
            except Exception:
                if not (result.skipped and result.step == self.recorded):
                    with suppress(RecordFailed):  # the disk is full; the error that is raised matters more
                        self.record.write(result.step, metrics)
                raise
            if self.log_due(result, extra=evaluates or saves):
                self.record.write(result.step, metrics | self.saver.take_metrics())
                self.recorded = result.step
                self.account.calibration_due = False
            if result.stopped:
                return "stopped"
        return "done"

    def require_room(self, error: Exception) -> None:
        """Return if the window that raised is to be run again with smaller micro-batches; otherwise raise the error."""
        engine, batch = self.engine, self.engine.plan.batch
        if engine.shrinks(error):
            if engine.world.rank == 0:
                oom.note(self.plan, engine.plan.batch)
                print(f"step {engine.steps + 1}: out of memory. From here on: {engine.plan.batch.words}", flush=True)
            return
        if not oom.is_out_of_memory(error):
            raise error
        if batch.on_oom is OnOom.shrink and (smaller := batch.shrunk()) is not None:
            oom.note(self.plan, smaller)
        raise oom.out_of_memory(error, batch, engine.world.rank, engine.steps + 1) from None

    @contextmanager
    def out_of_memory(self, when: str) -> Iterator[None]:
        """Explain an out-of-memory error in the body. Smaller micro-batches may not help there, so none are stored for
        later attempts."""
        try:
            yield
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            raise oom.out_of_memory_beside(error, self.engine.world.rank, self.engine.steps + 1, when) from None

    def loss(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, int | Tensor]:
        return loss_and_items(self.task, self.engine, model, batch)

    def eval_due(self, result: StepResult) -> bool:
        if self.held_out is None:
            return False
        every = self.plan.train.eval_every
        if result.last:
            return not result.stopped
        return bool(every) and not result.skipped and result.step % every == 0

    def owed(self, last: dict[str, Any] | None) -> Metrics:
        """Return the metrics of the evaluation due at the step that the run resumes from, if its record lacks them
        because the run stopped before it, or it failed; otherwise nothing.

        Args:
            last: the record of that step in the checkpoint.
        """
        if last is None or self.held_out is None:
            return {}
        every = self.plan.train.eval_every
        if not self.engine.over and (not every or last["step"] % every):
            return {}
        paths, world = self.plan.paths, self.engine.world
        written = world.of_rank_0(read_record(paths.metrics, last["step"]) if world.rank == 0 else None)
        if written is None or "eval/loss" not in written:
            return self.evaluate()
        self.account.evaluated, self.account.eval_loss = True, written["eval/loss"]
        return {}

    def save_due(self, result: StepResult) -> bool:
        if not self.plan.checkpoint.enabled or not self.engine.steps:  # before the first step there is nothing to save
            return False
        return result.last or (not result.skipped and self.cadence.due(result))

    def metrics(self, result: StepResult) -> Metrics:
        engine = self.engine
        seen, peak = (engine.samples, engine.items), peak_memory_bytes(engine.device)
        metrics = step_metrics(result, engine.plan, seen, self.account.total_s, peak)
        metrics["batch/empty_windows"] = engine.empty_windows
        if self.account.since:
            metrics["progress/measured_since"] = self.account.since
        if engine.precision.scales:
            metrics["amp/skipped_steps"] = engine.skipped_steps
        if self.account.calibration_due or result.last:
            metrics |= self.account.calibration()
        if self.flops_per_sample is not None:
            flops_per_s = metrics["throughput/samples_per_s"] * self.flops_per_sample
            metrics["throughput/flops_per_s"] = flops_per_s
            if self.peak_flops is not None:
                metrics["throughput/mfu"] = flops_per_s / (self.peak_flops * engine.world.size)
        return metrics

    def log_due(self, result: StepResult, *, extra: bool) -> bool:
        # a skipped window is not a step and has no record; it is counted in the next one
        if result.skipped and (not result.last or result.step == self.recorded):
            return False
        return bool(extra or result.last or result.step % self.plan.train.log_every == 0)

    def save(self, result: StepResult, metrics: Metrics) -> Metrics:
        """Save a checkpoint, and return its metrics. ``metrics``: those of this step, which the checkpoint includes,
        because the process may end before they are recorded."""
        began = time.perf_counter()
        PULSE.beat(Phase.saving)
        with PULSE.doing(Role.collective):
            self.engine.share_buffers()
        self.record.sync()
        next_due = None if result.last else self.cadence.next(result.step)
        self.saver.save(as_record(result.step, metrics), next_due=next_due)
        self.cadence.start_clock()
        return {"time/checkpoint_s": time.perf_counter() - began}

    def try_evaluation(self) -> None:
        """Evaluate the first micro-batch of each rank, so that an error in the evaluation shows before training."""
        if self.held_out is not None and not isinstance(self.held_out, Iterator):  # an iterator would lose the samples
            kept = KeptAttributes(self.engine.parallel.module, self.task)
            with self.out_of_memory("while the first held-out data was evaluated"):
                self.evaluated(most=1)
            if changed := kept.put_back():
                print(f"The evaluation that was tried before the first step has changed {changed}.", flush=True)

    def evaluate(self) -> Metrics:
        """Return the held-out loss, the mean over items; nothing if the task has no held-out data."""
        if self.held_out is None:
            return {}
        loss_sum, items = self.evaluated()
        if not items > 0:
            raise DataError(
                "eval_data() holds no item: there is nothing to evaluate on.\n  Return None to have no evaluation."
            )
        loss = loss_sum / items
        self.account.evaluated = True
        self.account.eval_loss = loss if math.isfinite(loss) else None
        return {"eval/loss": loss}

    def evaluated(self, most: int | None = None) -> tuple[float, float]:
        """Return (loss_sum, num_items) over the held-out data of all ranks. ``most``: limit of micro-batches per rank;
        None: all."""
        engine, collate = self.engine, getattr(self.task, "collate", None)
        PULSE.beat(Phase.evaluating)
        totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
        with evaluation(engine) as module:
            batches = eval_batches(self.held_out, engine.plan, engine.world, engine.device, collate, most)
            for number in itertools.count(1):
                with named_as_held_out(number, engine.world.rank):
                    with PULSE.doing(Role.io):
                        batch = next(batches, None)
                    if batch is None:
                        break
                    PULSE.beat(Phase.evaluating, number)
                    with engine.precision.autocast():
                        loss = as_loss(self.task.loss(module, batch.data), batch.samples, self.plan.task.target)
                    require_sum(loss.total, loss.items)
                if batch.samples:
                    totals[0] += loss.total.double()
                    totals[1] += loss.items
        if engine.world.size > 1:
            dist.all_reduce(totals)
        loss_sum, items = totals.tolist()
        return loss_sum, items
