"""Engine for a loop of the user's own that saves, resumes, evaluates and records what `launch train` does.

engine = Engine(model, optimizer, plan)         # launcher.Engine is the class of this module
engine.resume()                                 # from the newest checkpoint of the run, if it has one
for window in engine.windows(dataset):
    for batch in window:
        engine.backward(*loss(engine.model, batch))
    engine.finish_step(engine.step())           # saves, evaluates and records what is due
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from launcher.errors import EngineMisuse
from launcher.process import StopRequest
from launcher.rundir.fencing import Fence
from launcher.rundir.files import write_text
from launcher.task import Task, seed_everything
from launcher.train.callback_set import require_text_keys
from launcher.train.checkpoint import save
from launcher.train.checkpoint.load import load_newest
from launcher.train.data.loader import Collate
from launcher.train.engine.engine import Engine
from launcher.train.engine.replica_check import ReplicaCheck
from launcher.train.engine.window import Forward
from launcher.train.engine.window_totals import StepResult
from launcher.train.evaluation import Evaluation, LoopTask, sets_by_name
from launcher.train.metrics import Metrics
from launcher.train.training_loop import Saves, TrainingLoop


class RunEngine(Engine):
    """Engine with checkpoints, evaluation and record in the run's directory. Until ``resume`` is called it writes
    nothing, and is an Engine.

    Args: those of Engine.
    """

    _requested: StopRequest | None = None
    _loop: TrainingLoop | None = None
    _result: StepResult | None = None
    _unfinished = False  # neither finish_step nor save was called after the newest step

    def evaluate(self, data: Any, loss: Forward, collate: Collate | None = None) -> Metrics:
        """Return eval/loss over all ranks, and the averages of further terms and metrics of the loss. All ranks call
        it, between two windows. Each sample is used once; random state, buffers and modes are restored.

        Args:
            data: a data set, or a dict of several by name.
            loss: (model, batch) -> (loss_sum, items), (loss_sum, items, metrics), Loss or a list of several.

        Raises:
            EngineMisuse: a window is open.
            ReplicasDiffer: the ranks have different models.
        """
        self._require_values()
        self.require_closed("engine.evaluate() must be called between two windows: after engine.step().")
        ReplicaCheck(self).require_same()
        with self.callbacks.around_evaluation(self):
            return Evaluation(self, cast("Task", LoopTask(loss, collate)), sets_by_name(data)).run()

    def resume(
        self,
        *,
        eval_data: Any = None,
        loss: Forward | None = None,
        collate: Collate | None = None,
        parts: Mapping[str, Engine] | None = None,
    ) -> dict[str, Any] | None:
        """Continue from the newest intact checkpoint in the run's directory, or start the run; open its record; and let
        SIGTERM, SIGINT and SIGUSR2 stop the loop after the current window. All ranks call it once, before the first
        window.

        The run's directory is that of `launch run`; under torchrun it is runs/NAME, with run.name given to make_plan.
        A run that starts gets other random numbers on each rank from here on, for dropout; one that resumes, those of
        the checkpoint.

        Args:
            eval_data: held-out data, or a dict of several, evaluated every train.eval_every steps, or at the end of
                each epoch (train.eval_every=epoch), and at the end.
            loss: (model, batch) -> (loss_sum, items), (loss_sum, items, metrics), Loss or a list of several, for
                ``eval_data``.
            collate: as of ``windows``, for ``eval_data``.
            parts: further engines of this process by name, such as the second one of a GAN. They are saved in the same
                checkpoints and restored with them.

        Returns:
            What was passed as ``extra`` when the checkpoint was saved, an empty dict if nothing was; None for a run
            that starts.

        Raises:
            CheckpointFailed: there is no space for a checkpoint.
            EngineMisuse: the ranks have different directories, or steps were taken already.
            NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
            Superseded: a newer attempt of the run has started.
            WrongCheckpoint: the newest checkpoint does not fit this plan or these parts.
        """
        self._require_fresh(parts or {})
        if eval_data is not None and loss is None:
            raise EngineMisuse("engine.resume(eval_data=...) needs loss=function of (model, batch).")
        plan = self.plan
        fence = Fence.here(plan.paths)
        if self.world.rank == 0:
            Path(plan.run.dir).mkdir(parents=True, exist_ok=True)
            fence.check()
            save.delete_partial(plan.paths, fence)
            whole = dataclasses.replace(plan, batch=plan.batch.of_all_sites)
            write_text(plan.paths.loop_plan, whole.to_json() + "\n")  # for reports and trackers
        self.world.of_all(None)  # the directory exists
        cadence, failed = save.Cadence(plan.checkpoint), threading.Event()
        self._requested = requested = StopRequest()
        restored = None
        if plan.checkpoint.enabled:
            restored = load_newest(self, plan.paths, fence, parts=parts)
        self._require_values()
        if restored is None:
            seed_everything(plan.train.seed + 1 + self.world.rank_in_job)
        task = cast("Task", LoopTask(loss, collate))
        saves = Saves(cadence, fence, failed, parts=parts or {})
        self._loop = TrainingLoop(plan, task, self, Evaluation(self, task, sets_by_name(eval_data)), saves, restored)
        self.attach(lambda: failed.is_set() or requested(), cadence.by_clock, self._windows_open)
        self._loop.begin(restored)
        if self.over or self._loop.totals.best.exhausted:  # its summary was deleted when this attempt started
            self._end("done")
        cadence.start_clock()
        return None if restored is None else restored.run.get("extra", {})

    def step(self) -> StepResult:
        self._require_values()
        if self._unfinished:
            raise EngineMisuse(
                f"engine.finish_step(result) was not called after step {self.steps}: this run, which engine.resume() "
                "has started, would have neither record\n  nor checkpoints. Call it after each engine.step()."
            )
        self._result = result = super().step()
        if self._loop is not None:
            self._loop.count(result)
            self._unfinished = True
        elif result.last:
            ReplicaCheck(self).require_same()  # nothing of this engine's is saved, and no other check follows
        return result

    def finish_step(self, result: StepResult, extra: dict[str, Any] | None = None) -> None:
        """Save, evaluate and record what is due after this step, by the plan's checkpoint.every, train.eval_every and
        train.log_every. All ranks call it, after each step. After the last one it also writes summary.json.

        Args:
            extra: state of the loop itself, as JSON, for a checkpoint; rank 0's is stored.

        Raises:
            CheckpointFailed: a checkpoint could not be written, and checkpoint.on_error is stop.
            RecordFailed: metrics.jsonl cannot be written.
        """
        loop = self._require_loop("finish_step")
        loop.extra = _json(extra)
        self._unfinished = False
        loop.finish_step(result)
        if result.last or loop.totals.best.exhausted:
            self._end("stopped" if result.stopped else "done")

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Save a checkpoint now, even if none is due. All ranks call it, between two windows, after a step.

        Args:
            extra: as of ``finish_step``.
        """
        loop, result = self._require_loop("save"), self._result
        self._unfinished = False
        if result is None or not result.step:
            return  # the newest checkpoint is of this step, as at the run's end, or there is nothing to save yet
        loop.extra = _json(extra)
        loop.save(result, loop.step_metrics(result) | loop.memory())

    @contextmanager
    def _windows_open(self) -> Iterator[None]:
        """Receive stop signals during a loop over the windows, and wait for a save in progress when it ends: the script
        may destroy the process group next."""
        assert self._loop is not None
        assert self._requested is not None
        self._requested.take()
        try:
            yield
        finally:
            self._loop.saver.join()
            self._requested.release()

    def _end(self, verdict: str) -> None:
        assert self._loop is not None
        assert self._requested is not None
        self._requested.release()
        self.finish()
        self.callbacks.call("on_end", self, verdict)
        self._result = None
        self._loop.close()
        self._loop.write_summary(verdict)

    def _require_fresh(self, parts: Mapping[str, Engine]) -> None:
        if self._loop is not None or self.steps or any(part.steps for part in parts.values()):
            raise EngineMisuse("engine.resume() must be called once, before the first step.")
        roots = self.world.of_all(self.plan.run.dir)
        if len(set(roots)) > 1:
            raise EngineMisuse(
                f"The ranks have different run directories: {roots[0]} and {next(r for r in roots if r != roots[0])}.\n"
                '  Start the script with `launch run`, or name the run: make_plan(["run.name=NAME", ...]).'
            )

    def _require_values(self) -> None:
        """Raise EngineMisuse if the model has neither the weights of checkpoint.init_from nor those of a checkpoint."""
        if self.lacks_values:
            raise EngineMisuse(
                f"{self.plan.run.dir} has checkpoints, so checkpoint.init_from was not read, and engine.resume(),\n"
                "  which loads the newest one, was not called. Call it before the first window, or name another run."
            )

    def _require_loop(self, method: str) -> TrainingLoop:
        if self._loop is None:
            raise EngineMisuse(f"engine.{method}() needs engine.resume() before the first window.")
        self.require_closed()
        return self._loop


def _json(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        json.dumps(extra, allow_nan=False)
        require_text_keys(extra)
    except (TypeError, ValueError) as error:
        raise EngineMisuse(
            f"extra must be JSON: {error}.\n  Keep tensors as buffers of the model, or in a callback's state_dict."
        ) from None
    return extra
