"""Training loop: steps of a run, each followed by what is due: a checkpoint, an evaluation, a record."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.config.schema import OnOom
from launcher.errors import LauncherError, RecordFailed, TaskError
from launcher.heartbeat import HEARTBEAT, Phase, Wait
from launcher.loss import Loss, as_losses
from launcher.plan.run_plan import RunPlan, is_due, predicted_metrics
from launcher.plan.sync_policy import SHARDED
from launcher.process import cells_at_once
from launcher.rundir.fencing import Fence
from launcher.rundir.files import write_json
from launcher.task import Task, is_mapped, is_ready
from launcher.train import metrics
from launcher.train.checkpoint import save
from launcher.train.checkpoint.async_save import Saver
from launcher.train.checkpoint.contents import require_restorable
from launcher.train.checkpoint.load import Restored
from launcher.train.checkpoint.optimizer_parts import optimizer_state
from launcher.train.checkpoint.run_totals import RunTotals
from launcher.train.engine import oom
from launcher.train.engine.engine import Engine
from launcher.train.engine.replica_check import ReplicaCheck
from launcher.train.engine.window import Items
from launcher.train.engine.window_totals import StepResult
from launcher.train.evaluation import Evaluation
from launcher.train.measure.flops import peak_flops
from launcher.train.metrics import Metrics, NoRecord, Record
from launcher.train.parallel.batchnorm import refusal_of_one_value
from launcher.train.parallel.shard_units import direct_use, is_direct_use

# messages on stragglers that a process prints: on a noisy machine ranks take turns
MAX_STRAGGLER_LINES = 6
# windows after which a process compares its replicas with the others' before anything is due
EARLY_CHECK = 3


@dataclass(frozen=True)
class Saves:
    """Settings that determine when and how a run's checkpoints are written.

    Args:
        failed: set when a background save fails and the run must stop.
        commit: commit of the user's code, if known.
        parts: further engines of this process, which are saved in the same checkpoints.
    """

    cadence: save.Cadence
    fence: Fence
    failed: threading.Event
    commit: str | None = None
    parts: Mapping[str, Engine] = field(default_factory=dict)


class TrainingLoop:
    """Steps of a run, each followed by what is due: a checkpoint, an evaluation, a record.

    Args:
        plan: the plan as it was submitted; the engine's may have smaller micro-batches.
        restored: the checkpoint that the engine has just loaded; None: the run starts.
    """

    def __init__(
        self,
        plan: RunPlan,
        task: Task,
        engine: Engine,
        evaluation: Evaluation,
        saves: Saves,
        restored: Restored | None,
    ) -> None:
        self.plan, self.task, self.engine, self.evaluation = plan, task, engine, evaluation
        # its clock starts now: loading a checkpoint is not training
        self.totals = RunTotals(engine, saves.commit)
        if restored is not None:
            self.totals.restore(restored)
        if plan.checkpoint.enabled:
            save.require_writable(engine, plan.paths.checkpoints, resumed=restored is not None)
            for each in (engine, *saves.parts.values()):
                require_restorable(each)
        self.cadence, self.fence = saves.cadence, saves.fence
        self.saver = Saver(engine, self.totals, saves.fence, saves.failed, saves.parts)
        self.replicas = [ReplicaCheck(each) for each in (engine, *saves.parts.values())]
        self.windows = 0  # of this process
        self.extra: dict[str, Any] | None = None  # JSON data of the user's own loop, for the next checkpoint
        self.record: Record | NoRecord = NoRecord()
        self.recorded: int | None = None  # step of the newest record
        # one record states the prediction: the first of the run, and the first after a change of what is predicted
        self.prediction_due = restored is None or not restored.comparable
        self.straggler_lines = 0
        self.cells_at_once = cells_at_once()
        self.smaller_windows = False  # whether they were reported
        own: Callable[[], float] | None = getattr(task, "flops_per_sample", None)
        self.flops_per_sample = plan.task.flops_per_sample if own is None else own()
        self.peak_flops: float | None = None
        if engine.device.type == "cuda":
            name, tf32 = torch.cuda.get_device_name(engine.device), torch.backends.cuda.matmul.fp32_precision
            self.peak_flops = peak_flops(name, plan.precision.kind, tf32=tf32 == "tf32")

    def begin(self, restored: Restored | None) -> None:
        """Try the evaluation, or catch up on the one that is missing at the step that the run resumes from; and open
        the record.

        Args:
            restored: the checkpoint that was loaded; None: the run starts.
        """
        engine, best, missing = self.engine, self.totals.best, Metrics()
        last: dict[str, Any] | None = None if restored is None else restored.run["record"]
        engine.callbacks.start(engine)
        if last is None or best.is_new:
            when = "while the first held-out data was evaluated"
            with self.explain_out_of_memory(when, "train.eval_micro_size"), engine.callbacks.around_evaluation(engine):
                names = self.evaluation.try_first()
            if names is not None:
                best.require_known(names)
        if last is not None:
            self.recorded, missing = engine.steps, self.missing_evaluation(last)
        if engine.world.rank == 0:
            complete = last and last | missing
            self.record = metrics.open_record(engine.plan, self.fence, engine.steps, complete, amended=bool(missing))

    def run(self, samples: Any) -> str:
        """Run the remaining steps of the plan, and return the verdict: done or stopped."""
        engine, best = self.engine, self.totals.best
        if best.exhausted:
            return "done"
        self.cadence.start_clock()
        collate = None if is_ready(samples) else getattr(self.task, "collate", None)
        compare = not is_mapped(samples)  # mapped data was compared
        items = items_method_of(self.task)
        engine.tries_loss = not engine.steps
        for window in engine.windows(samples, collate, self.loss, items, compare_data=compare):
            try:
                for batch in window:
                    engine.backward(self.loss(engine.model, batch))
            except Exception as error:
                self.shrink_or_raise(error)
                continue  # engine.windows yields this window again, halved
            with self.explain_out_of_memory("while the optimizer took its step, whose state needs memory, too"):
                result = engine.step()
            self.count(result)
            self.finish_step(result)
            if result.stopped:
                return "stopped"
            if best.exhausted:
                break
        return "done"

    def loss(self, model: Callable[..., Any], batch: Any) -> list[Loss]:
        return losses_of(self.task, self.engine, model, batch)

    def count(self, result: StepResult) -> None:
        """Add a step to the run's totals, and print what is worth a line."""
        self.totals.add(result)
        self.windows += 1
        if not self.engine.position.window:
            self.totals.epoch_end = result.step + result.skipped
        self.print_events(result)

    def close(self) -> None:
        """Wait for the save in progress, and close the record."""
        self.saver.finish()
        self.record.close()

    def write_summary(self, verdict: str) -> None:
        """Write summary.json. ``verdict``: done or stopped."""
        if self.engine.world.rank == 0:
            self.fence.check()
            write_json(self.plan.paths.summary, self.totals.summary(verdict))

    def finish_step(self, result: StepResult) -> None:
        """Save, evaluate and record what is due. The save comes first: an error in the evaluation must not lose the
        steps so far."""
        # with several sites, reading callbacks' state completes their exchange in progress, which only a save may do
        reads_state = self.plan.checkpoint.enabled and self.plan.sites is None
        if self.windows == 1 and self.plan.checkpoint.enabled:
            # errors of the first step, not of the first checkpoint
            self.engine.left_out.require_unchanged()
            optimizer_state(self.engine)
            if reads_state:
                self.engine.callbacks.state_dict()
        values, saves, evaluates = self.step_metrics(result), self.save_due(result), self.eval_due(result)
        if records := self.log_due(result, extra=evaluates or saves):
            values |= self.memory() | self.engine.context.take_scalars() | self.engine.sites.take_metrics()
        try:
            if (self.windows == EARLY_CHECK or result.last) and not saves:  # a save checks, too
                self.require_same_replicas(callbacks=reads_state)
            if saves:
                values |= self.save(result, values)
            if evaluates:
                values |= self.evaluate()
                values |= self.judge(result, values, saved=saves)
        except Exception:
            if not (result.skipped and result.step == self.recorded):
                with suppress(RecordFailed):  # the disk is full; the error that is raised matters more
                    self.record.write(result.step, values)
            raise
        if self.totals.epoch_over(result.step):
            self.totals.epoch_end = None
        if records:
            self.record.write(result.step, values | self.saver.take_metrics())
            self.recorded = result.step
            self.totals.calibration_due = self.prediction_due = False

    def print_events(self, result: StepResult) -> None:
        engine = self.engine
        if engine.world.rank != 0:
            return
        if result.nonfinite is not None:
            print(f"{result.nonfinite}\n  The window is skipped (train.on_nonfinite=skip).", flush=True)
        elif result.skipped:
            why = f"fp16 overflowed at loss scale {result.scale}" if result.items else "the window has no item"
            print(f"step {engine.steps + 1}: skipped, {why}", flush=True)
        if engine.stragglers.news is not None and self.straggler_lines < MAX_STRAGGLER_LINES:
            self.straggler_lines += 1
            last = self.straggler_lines == MAX_STRAGGLER_LINES
            rest = " Further ones are in metrics.jsonl only (straggler/rank)." if last else ""
            print(f"step {engine.steps}: {engine.stragglers.news}{rest}", flush=True)
        size, shards = engine.plan.batch.global_size_at(result.window), engine.plan.train.data_shards
        if shards > 1 and result.samples < size and engine.position.window and not self.smaller_windows:
            self.smaller_windows = True
            print(
                f"step {engine.steps}: {result.samples} of {size} samples: some of the stream's {shards} shards have "
                "ended before others, and\n  windows are smaller until the end of the epoch. Files of equal length, or "
                "train.data_shards=1, keep them whole.",
                flush=True,
            )

    def shrink_or_raise(self, error: Exception) -> None:
        """Return if the window that raised is to be run again with smaller micro-batches; otherwise raise the error."""
        engine, batch = self.engine, self.engine.plan.batch
        if engine.shrinks(error):
            if engine.world.rank == 0:
                oom.store_micro_size(self.plan, engine.plan.batch)
                print(f"step {engine.steps + 1}: out of memory. Continuing with {engine.plan.batch.text}", flush=True)
            return
        if (kind := engine.plan.strategy.kind) in SHARDED and is_direct_use(error):
            raise TaskError(direct_use("a parameter", kind)) from error
        model, index = engine.parallel.module, engine.position.index
        if (refusal := refusal_of_one_value(error, model, self.plan, index, engine.place)) is not None:
            raise refusal from error
        if not oom.is_out_of_memory(error):
            if not isinstance(error, LauncherError):  # shown without traceback, hence without notes
                error.add_note(f"In {engine.place}.")
            raise error
        if batch.on_oom is OnOom.shrink and (smaller := batch.shrunk()) is not None:
            oom.store_micro_size(self.plan, smaller)
        raise oom.out_of_memory(error, batch, engine.world.rank, engine.steps + 1) from None

    @contextmanager
    def explain_out_of_memory(self, when: str, size_key: str = "batch.micro_size") -> Iterator[None]:
        """Explain an out-of-memory error in the body. Smaller micro-batches may not help there, so none are stored for
        later attempts. ``size_key``: key of the size that the body's memory depends on."""
        try:
            yield
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            rank, step = self.engine.world.rank, self.engine.steps + 1
            raise oom.out_of_memory_beside(error, rank, step, when, size_key) from None

    def step_metrics(self, result: StepResult) -> Metrics:
        engine, totals = self.engine, self.totals
        values = metrics.step_metrics(result, engine.plan, (engine.samples, engine.items), totals.total_s)
        values |= engine.metrics()
        values |= {f"train/{name}": value for name, value in result.metrics.items()}
        values["batch/empty_windows"] = engine.empty_windows
        if engine.nonfinite_windows:
            values["batch/nonfinite_windows"] = engine.nonfinite_windows
        values |= totals.best.metrics()
        if totals.since:
            values["progress/measured_since"] = totals.since
        if self.cells_at_once > 1:
            values["sweep/at_once"] = self.cells_at_once
        if engine.precision.scales:
            values["amp/skipped_steps"] = engine.skipped_steps
        if totals.calibration_due or result.last:
            values |= totals.calibration()
        if self.prediction_due:
            values |= predicted_metrics(engine.plan)
        if self.flops_per_sample is not None:
            flops_per_s = values["throughput/samples_per_s"] * self.flops_per_sample
            values["throughput/flops_per_s"] = flops_per_s
            if self.peak_flops is not None:
                values["throughput/mfu"] = flops_per_s / (self.peak_flops * engine.world.in_job[1])
        return values

    def memory(self) -> Metrics:
        """Return the peak memory for a record. It is not read in each step: torch collects all of its statistics."""
        return metrics.peak_memory(self.engine.device)

    def save_due(self, result: StepResult) -> bool:
        if not self.plan.checkpoint.enabled or not self.engine.steps:  # before the first step there is nothing to save
            return False
        epoch_over = self.totals.epoch_over(result.step)
        return result.last or (not result.skipped and self.cadence.due(result, epoch_over=epoch_over))

    def eval_due(self, result: StepResult) -> bool:
        if not self.evaluation.sets:
            return False
        if result.last:
            return not result.stopped
        epoch_over = self.totals.epoch_over(result.step)
        return not result.skipped and is_due(self.plan.train.eval_every, result.step, epoch_over=epoch_over)

    def log_due(self, result: StepResult, *, extra: bool) -> bool:
        # a skipped window is not a step and has no record; it is counted in the next one
        if result.skipped and (not result.last or result.step == self.recorded):
            return False
        return bool(extra or result.last or result.step % self.plan.train.log_every == 0)

    def save(self, result: StepResult, values: Metrics, *, last: bool = False) -> Metrics:
        """Save a checkpoint, and return its metrics.

        Args:
            values: the metrics of this step, which the checkpoint includes, because the process may end before they are
                recorded.
            last: no step follows, although there would be further ones.
        """
        self.require_same_replicas(callbacks=True)
        self.engine.left_out.require_unchanged()
        started = time.perf_counter()
        HEARTBEAT.beat(Phase.saving)
        with HEARTBEAT.waiting_for(Wait.collective):
            for engine in (self.engine, *self.saver.parts.values()):
                engine.share_buffers()
        self.record.sync()
        next_due = None if result.last or last else self.cadence.next(result.step)
        self.saver.save(metrics.as_record(result.step, values), next_due=next_due, extra=self.extra)
        self.engine.callbacks.call("on_save", self.engine, self.plan.paths.checkpoint(result.step))
        self.cadence.start_clock()
        return {"time/checkpoint_s": time.perf_counter() - started}

    def require_same_replicas(self, *, callbacks: bool = False) -> None:
        """Check that replicas are equal. ``callbacks``: the state of callbacks, too, which is about to be saved.

        Raises:
            CallbackFailed: the state of a callback differs between ranks.
            ReplicasDiffer: the model, or a setting, differs between ranks.
        """
        for check in self.replicas:
            check.require_same(callbacks=callbacks)

    def evaluate(self) -> Metrics:
        """Evaluate the held-out data, and return its metrics and what the task has logged."""
        self.require_same_replicas()
        when, callbacks = "while the held-out data was evaluated", self.engine.callbacks
        with self.explain_out_of_memory(when, "train.eval_micro_size"), callbacks.around_evaluation(self.engine):
            values = self.evaluation.run()
            callbacks.call("on_evaluation", self.engine, dict(values))
        self.totals.evaluation = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.totals.evaluated_step = self.engine.steps
        return values | self.engine.context.take_scalars()

    def judge(self, result: StepResult, values: Metrics, *, saved: bool) -> Metrics:
        """Compare this step's evaluation with the best one; save it if it is better, or if the run ends because none
        was. Return the metrics of that.

        Args:
            values: the metrics of this step.
            saved: a checkpoint of this step is saved already.
        """
        best, saves = self.totals.best, self.plan.checkpoint.enabled
        improved = best.judge(result.step, values)
        if (warning := best.warning(values)) is not None and self.engine.world.rank == 0:
            print(f"step {result.step}: {warning}", flush=True)
        judged = best.metrics()
        if improved and saves and not saved:
            best.saved_as_best()
            judged |= self.save(result, values | judged)
        if best.exhausted and not result.last:
            if self.engine.world.rank == 0:
                print(f"step {result.step}: stopped early: {best.verdict}", flush=True)
            if saves:
                judged |= self.save(result, values | judged, last=True)
        return judged

    def missing_evaluation(self, last: dict[str, Any]) -> Metrics:
        """Return the metrics of the evaluation due at the step that the run resumes from, if its record lacks them
        because the run stopped before it, or it failed; otherwise nothing. It is judged in both cases, and
        callbacks get it unless the checkpoint has their state after it.

        Args:
            last: the record of that step in the checkpoint.
        """
        every, step = self.plan.train.eval_every, last["step"]
        due = self.engine.over or is_due(every, step, epoch_over=self.totals.epoch_over(step))
        if self.totals.epoch_over(step):
            self.totals.epoch_end = None
        if not self.evaluation.sets or not due:
            return {}
        world = self.engine.world
        written: dict[str, Any] = (
            world.of_rank_0(metrics.read_record(self.plan.paths.metrics, step) if world.rank == 0 else None) or last
        )
        best = self.totals.best
        if (
            self.totals.other_held_out
            or not self.evaluation.loss_names | {best.metric or "eval/loss"} <= written.keys()
        ):
            values = self.evaluate()
            best.judge(step, values)
            return values | best.metrics()
        self.totals.evaluation = {name: value for name, value in written.items() if name.startswith("eval/")}
        if self.totals.evaluated_step != step:
            values = {name: math.nan if value is None else value for name, value in self.totals.evaluation.items()}
            with self.engine.callbacks.around_evaluation(self.engine):
                self.engine.callbacks.call("on_evaluation", self.engine, values)
            self.totals.evaluated_step = step
        best.judge(step, self.totals.evaluation)
        return {}


def losses_of(task: Task, engine: Engine, model: Callable[..., Any], batch: Any) -> list[Loss]:
    """Return the terms of the task's loss of the current micro-batch."""
    if engine.outputs is not None:
        return [engine.outputs.loss(model, batch, engine.samples_in_batch)]
    return as_losses(task.loss(model, batch), engine.samples_in_batch, engine.plan.task.target)


def items_method_of(task: Task) -> Items | None:
    """Return the task's method ``items(batch)``, if it has one."""
    items: Items | None = getattr(task, "items", None)
    return items if callable(items) else None
