"""What surrounds the steps of a training run: build, evaluate, record, save, stop, sum up."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from launcher.config import Device, OptimizerKind
from launcher.errors import DataError, TaskError
from launcher.paths import write_json
from launcher.plan import OptimizerPlan, RunPlan
from launcher.train import checkpoint
from launcher.train.calibration import Calibrated
from launcher.train.engine import Engine
from launcher.train.held_out import eval_batches
from launcher.train.meter import CommStats
from launcher.train.step import StepResult
from launcher.train.task import Loss, Task, eval_data, load_task
from launcher.train.telemetry import (
    Metrics,
    NoRecord,
    Record,
    Sink,
    calibration_metrics,
    peak_flops,
    peak_memory_bytes,
    step_metrics,
)
from launcher.train.world import World


def train(plan: RunPlan, stop: Callable[[], bool]) -> None:
    """Run the plan on this rank, to its end or until ``stop``. Rank 0 writes metrics.jsonl and summary.json."""
    world = World.here()
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from)
    torch.manual_seed(plan.train.seed)  # the same initial parameters on every rank
    torch.use_deterministic_algorithms(plan.train.deterministic)
    engine = Engine(
        task.model,
        lambda parameters: build_optimizer(parameters, plan.optimizer, plan.cluster.device),
        plan,
        stop,
        getattr(task, "shard_units", None),
    )
    torch.manual_seed(plan.train.seed + 1 + world.rank)  # but dropout of its own
    record: Sink = Record(plan.paths.metrics) if world.rank == 0 else NoRecord()
    try:
        _Run(plan, task, engine, record).steps()
    finally:
        record.close()


def build_optimizer(parameters: Iterable[nn.Parameter], plan: OptimizerPlan, device: Device) -> Optimizer:
    if plan.kind is OptimizerKind.sgd:
        return SGD(parameters, plan.lr, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=plan.weight_decay)
    fused = device is Device.cuda
    return AdamW(parameters, plan.lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay, fused=fused)


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
    eval_loss: float | None = None
    calibrated: Calibrated | None = None
    typical: CommStats | None = None
    checkpoint_dir: str | None = None
    recorded: int | None = None
    step_seconds: list[float] = field(default_factory=list[float])
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.samples_per_s_at_peak: float | None = None
        peak, flops = peak_flops(self.engine.device), getattr(self.task, "flops_per_sample", None)
        if peak is not None and flops is not None:
            self.samples_per_s_at_peak = peak * self.engine.world.size / flops()

    def steps(self) -> None:
        engine, plan = self.engine, self.plan
        cadence = checkpoint.Cadence(plan.checkpoint)
        for window in engine.windows(self.task.train_data(), getattr(self.task, "collate", None)):
            for batch in window:
                loss = as_loss(self.task.loss(engine.model, batch), engine.samples_in_batch, plan.task.target)
                engine.backward(loss.total, loss.items)
            result = engine.step()
            self.take_in(result)
            extra: Metrics = {}
            if self.eval_due(result):
                extra |= self.evaluate()
            if plan.checkpoint.enabled and (result.last or (not result.skipped and cadence.due(engine))):
                extra |= self.save()
                cadence.saved()
            self.log(result, extra)
            if result.last and engine.world.rank == 0:
                write_json(plan.paths.summary, self.summary(result))

    def take_in(self, result: StepResult) -> None:
        self.calibrated = result.calibrated or self.calibrated
        if result.sync is self.plan.strategy.sync and result.samples == self.plan.batch.global_size:
            self.typical = result.comm
            self.step_seconds.append(result.step_s)

    def eval_due(self, result: StepResult) -> bool:
        every = self.plan.train.eval_every
        if result.last:
            return not result.stopped
        return bool(every) and not result.skipped and result.step % every == 0

    def log(self, result: StepResult, extra: Metrics) -> None:
        engine = self.engine
        if result.skipped:  # no step, so no record of one: the next record's amp/skipped_steps has it
            if engine.world.rank == 0:
                print(f"step {engine.steps + 1}: skipped, fp16 overflowed at loss scale {result.scale}", flush=True)
            if not result.last or engine.steps == self.recorded:
                return
        if not (extra or result.calibrated or result.last or result.step % self.plan.train.log_every == 0):
            return
        metrics = step_metrics(result, self.plan, (engine.samples, engine.items), peak_memory_bytes(engine.device))
        if engine.precision.scales:
            metrics["amp/skipped_steps"] = engine.skipped_steps
        if self.samples_per_s_at_peak is not None:
            metrics["throughput/mfu"] = metrics["throughput/samples_per_s"] / self.samples_per_s_at_peak
        self.record.write(result.step, metrics | extra)
        self.recorded = result.step

    def save(self) -> Metrics:
        began = time.perf_counter()
        self.engine.share_buffers()
        path = checkpoint.save(self.engine, self.plan.paths, self.plan.checkpoint.keep)
        self.checkpoint_dir = str(path)
        return {"time/checkpoint_s": time.perf_counter() - began}

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Mean loss over the items of the held-out data; nothing where the task has none."""
        data = eval_data(self.task)
        if data is None:
            return {}
        engine, module = self.engine, self.engine.parallel.module
        engine.share_buffers()
        training = [part for part in module.modules() if part.training]  # a task may keep some of them in eval mode
        module.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
        batches = eval_batches(data, self.plan, engine.world, engine.device, getattr(self.task, "collate", None))
        with engine.parallel.evaluation():
            for batch in batches:
                with engine.precision.autocast():
                    loss = as_loss(self.task.loss(module, batch.data), batch.samples, self.plan.task.target)
                if batch.samples:
                    totals[0] += loss.total.double()
                    totals[1] += loss.items
        for part in training:
            part.training = True
        if engine.world.size > 1:
            dist.all_reduce(totals)
        loss_sum, items = totals.tolist()
        if not items:
            raise DataError(
                "eval_data() holds no item: there is nothing to evaluate on.\n  Return None to have no evaluation."
            )
        loss = loss_sum / items
        self.eval_loss = loss if math.isfinite(loss) else None
        return {"eval/loss": loss}

    def summary(self, result: StepResult) -> dict[str, Any]:
        """What summary.json holds. ``train/loss``: of the last window; times: medians over full windows."""
        engine = self.engine
        summary: dict[str, Any] = {
            "verdict": "stopped" if result.stopped else "done",
            "resumed": 0,
            "steps": engine.steps,
            "train/loss": result.loss,
            "eval/loss": self.eval_loss,
            "batch/global_size": self.plan.batch.global_size,
            "progress/samples": engine.samples,
            "progress/items": engine.items,
            "memory/peak_bytes": peak_memory_bytes(engine.device),
            "amp/skipped_steps": engine.skipped_steps,
            "time/total_s": time.perf_counter() - self.started,
            "checkpoint": self.checkpoint_dir,
        }
        if self.typical is not None:
            summary["comm/wire_bytes"] = self.typical.wire_bytes
            summary["comm/wire_bytes_every"] = self.typical.wire_bytes_every
            summary["comm/saved_fraction"] = self.typical.saved_fraction
            summary["comm/time_s"] = self.typical.time_s
            if len(self.typical.kinds) > 1:
                for kind, traffic in self.typical.kinds.items():
                    summary[f"comm/{kind.value}/wire_bytes"] = traffic.wire_bytes
            summary["time/step_s"] = statistics.median(self.step_seconds)
            summary["throughput/samples_per_s"] = self.plan.batch.global_size / summary["time/step_s"]
        if self.calibrated is not None:
            summary |= calibration_metrics(self.calibrated)
        return summary
