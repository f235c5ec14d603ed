"""Totals over all attempts of a run, for summary.json, and its best evaluation by ``checkpoint.best``. Checkpoints
carry them from one attempt to the next."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.config.schema import BestMode
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.host import device_model, measured_device
from launcher.plan.run_plan import RunPlan, predicted_metrics
from launcher.plan.sync_policy import Collective
from launcher.plan.windows import WARM_UP_WINDOWS
from launcher.quantities import count
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint.load import Restored
from launcher.train.checkpoint.origin import origin_of
from launcher.train.checkpoint.save import Retention
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.measure.comm_meter import CommStats, Traffic
from launcher.train.metrics import Metrics, calibration_metrics, peak_memory

# number of the newest full windows over which the median step time is taken
SAMPLED_WINDOWS = 1000
# full windows needed before their median is recorded with the calibration
SETTLED_WINDOWS = 10


# totals that a checkpoint stores as they are
_STORED = ("loss", "metrics", "evaluation", "memory", "size", "since", "resumed", "worlds", "commit", "commits",
           "failed_saves", "total_s", "evaluated_step", "epoch_end")  # fmt: skip

# those of the best evaluation
_BEST = ("step", "value", "judged", "misses", "extra")


class BestEvaluation:
    """Best value of the metric ``checkpoint.best``: which checkpoint has it, and when ``train.patience`` ends the run.
    Without that key it does nothing.

    Every rank has the same state: it follows from metrics that are the same on all ranks. The evaluation of a step that
    was saved before it was evaluated is judged when the run resumes from there. A resumed run therefore keeps and ends
    as the undisturbed run does.

    Attributes:
        metric: the metric; None: there is nothing to judge.
        step, value: of the best evaluation; None before there is one with a finite value.
        judged: step of the newest evaluation that was judged.
        misses: evaluations since the best one.
        extra: steps of checkpoints that were saved only because they were the best, the newest last.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.metric, self._mode = plan.checkpoint.best, plan.checkpoint.best_mode
        self._keep, self._patience = plan.checkpoint.keep, plan.train.patience
        self.step: int | None = None
        self.value: float | None = None
        self.judged: int | None = None
        self.misses = 0
        self.extra: list[int] = []
        self._warned = False

    def judge(self, step: int, values: Mapping[str, float | None]) -> bool:
        """Return whether the evaluation of ``step`` is the best so far. A step is judged once; a value that is not
        finite is never the best.

        Raises:
            ConfigError: ``values`` lacks the metric.
        """
        if self.metric is None or self.judged == step:
            return False
        self.require_known(values)
        value = values[self.metric]
        self.judged = step
        direction = 1 if self._mode is BestMode.min else -1
        best = math.inf if self.value is None else direction * self.value
        if value is None or not math.isfinite(value) or direction * value >= best:
            self.misses += 1
            return False
        self.step, self.value, self.misses = step, value, 0
        return True

    def warning(self, values: Mapping[str, float | None]) -> str | None:
        """Return a message on the first evaluation of this process whose value is not finite; None otherwise."""
        if self.metric is None or self._warned or self.metric not in values:
            return None
        value = values[self.metric]
        if value is not None and math.isfinite(value):
            return None
        self._warned = True
        return f"Warning: checkpoint.best={self.metric} is {value} in this evaluation, which therefore is not the best."

    def require_known(self, names: Iterable[str]) -> None:
        """Check that the metric is among ``names``, those of an evaluation.

        Raises:
            ConfigError: it is not.
        """
        known = sorted(name for name in names if name.startswith("eval/"))
        if self.metric is not None and self.metric not in known:
            raise ConfigError(
                "checkpoint.best", self.metric, "the evaluation has no such metric.",
                f"{did_you_mean(self.metric, known)}Its metrics: {', '.join(known) or 'none'}.",
            )  # fmt: skip

    @property
    def exhausted(self) -> bool:
        """True if the run ends: ``train.patience`` evaluations in a row were no better."""
        return self._patience is not None and self.misses >= self._patience

    @property
    def is_new(self) -> bool:
        """True if there is a metric, and no evaluation has been judged by it."""
        return self.metric is not None and self.judged is None

    def retention(self) -> Retention:
        """Return the checkpoints to keep."""
        superseded = tuple(step for step in self.extra if step != self.step)
        return Retention(self._keep, self.step, superseded)

    def saved_as_best(self) -> None:
        """Note that the current step is saved only because it is the best so far."""
        if self.step is not None:
            self.extra = [*self.extra[-1:], self.step]  # an earlier one was deleted with the last save

    def metrics(self) -> Metrics:
        """Return the metrics of the record."""
        if self.step is None or self.value is None:
            return {}
        return {"best/step": self.step, "best/value": self.value}

    def summary(self, paths: RunPaths, *, over: bool) -> dict[str, Any]:
        """Return the entries of summary.json. ``over``: the run has reached its planned end."""
        if self.metric is None or self._mode is None:
            return {}
        directory = None if self.step is None else paths.checkpoint(self.step)
        best = {
            "metric": self.metric,
            "mode": self._mode.value,
            "step": self.step,
            "value": self.value,
            "judged": self.judged,
            "directory": str(directory) if directory is not None and directory.exists() else None,
        }
        return {"best": best} | ({"stopped_early": self.verdict} if self.exhausted and not over else {})

    @property
    def verdict(self) -> str:
        """Reason why the run ends early."""
        since = f"since step {self.step} ({self.value:.6g})" if self.step is not None else "from the start"
        return f"{self.metric} has not improved in {count(self.misses, 'evaluation')}, {since}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, for a checkpoint."""
        return {"metric": self.metric, "mode": self._mode} | {name: getattr(self, name) for name in _BEST}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Restore ``state``, and return a message if it is dropped: it is that of another metric, or direction."""
        if (state["metric"], state["mode"]) != (self.metric, self._mode):
            if state["step"] is None:
                return ""
            now = "nothing is the best now" if self.metric is None else f"that by {self.metric} starts afresh"
            return (
                f"The best evaluation by {state['metric']} ({state['mode']}), {state['value']:.6g} at step "
                f"{state['step']}, no longer counts, and its checkpoint is kept no longer than others: {now}."
            )
        for name in _BEST:
            setattr(self, name, state[name])
        return ""


class RunTotals:
    """Totals of one run, updated by every rank after each window.

    Attributes:
        loss: mean loss of the last window with items; None before there is one.
        metrics: last averages of the loss's metrics and named terms; None for one that was not finite.
        evaluation: metrics of the last evaluation; None for one that was not finite.
        epoch_end: step after which the latest epoch's evaluation and checkpoint are due, until they are made; the next
            step if the epoch's last window was skipped.
        evaluated_step: step of the last evaluation in this process or in the checkpoint; None before there is one.
        best: the best evaluation by checkpoint.best.
        typical: communication of the last full window.
        seconds: (step, waiting for data) of full windows, without the warm-up windows of each process.
        warm_up_seconds: the same, of this process's warm-up windows.
        calibration_due: the calibration is to be part of the next record: ``seconds`` has reached ``SETTLED_WINDOWS``.
        memory: peak memory of this rank, as in a record.
        resumed: number of resumes from a checkpoint that led to this attempt.
        seconds_before: duration of training up to the checkpoint that this process resumed from.
        checkpoint: directory of the newest checkpoint.
        failed_saves: number of checkpoints that could not be written.
        size: samples of the last full window.
        since: step from which time, communication and memory of a step are as now; 0: from the start.
        worlds: for each resume with other ranks, hardware, strategy, batch or precision: the step, and both settings.
        commit: commit of the task's code, known to rank 0.
        commits: for each resume with another commit: the step, and both commits.
    """

    def __init__(self, engine: Engine, commit: str | None = None) -> None:
        self.engine, self._batch = engine, engine.plan.batch
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.evaluation: dict[str, float | None] = {}
        self.evaluated_step: int | None = None
        self.epoch_end: int | None = None
        self.best = BestEvaluation(engine.plan)
        self.typical: CommStats | None = None
        self.seconds = deque[tuple[float, float]](maxlen=SAMPLED_WINDOWS)
        self.warm_up_seconds = deque[tuple[float, float]](maxlen=SAMPLED_WINDOWS)
        self.calibration_due = False
        self.memory: Metrics = {}
        self.resumed = self.failed_saves = self.since = 0
        self.seconds_before = 0.0
        self.checkpoint: str | None = None
        self.size: int | None = None
        self.worlds: list[dict[str, Any]] = []
        self.commit = commit
        self.data: Mapping[str, Any] = {}  # fingerprint of the data, for a later resume
        self.other_held_out = False  # than that of the record so far
        self.commits: list[dict[str, Any]] = []
        self._started = time.perf_counter()
        self._windows = 0  # of this process

    def add(self, result: StepResult) -> None:
        if not math.isnan(result.loss) and result.nonfinite is None:
            self.loss = result.loss
            if result.metrics:
                means = {f"train/{name}": mean for name, mean in result.metrics.items()}
                self.metrics |= {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
        self._windows += 1
        size = self._batch.global_size_at(result.window)
        if result.samples != size:
            return
        if size != self.size:  # batch.ramp has entered its next stage
            self.size = size
            self.seconds.clear()
            self.warm_up_seconds.clear()
        self.typical = result.comm
        spent = self.engine.stragglers.spent
        waited_s = result.data_s if spent is None else max(result.data_s, spent.data_most_s)
        warm = self._windows > WARM_UP_WINDOWS
        (self.seconds if warm else self.warm_up_seconds).append((result.step_s, waited_s))
        self.calibration_due |= warm and len(self.seconds) == SETTLED_WINDOWS

    @property
    def total_s(self) -> float:
        return self.seconds_before + time.perf_counter() - self._started

    def peak_memory(self) -> Metrics:
        """Update and return this rank's peak memory in bytes, over all starts of the run."""
        now = peak_memory(self.engine.device)
        self.memory = {name: max(value, self.memory.get(name, 0)) for name, value in now.items()}
        return self.memory

    def calibration(self) -> dict[str, float]:
        """Return the calibration's metrics of a whole step; empty until there is a calibration and a step time."""
        calibrated = self.engine.calibrated
        if calibrated is None or not self.seconds:
            return {}
        step_s, data_s = (statistics.median(column) for column in zip(*self.seconds, strict=True))
        reads_ahead = self.engine.plan.train.loader_workers > 0
        return calibration_metrics(calibrated, step_s, data_s, reads_ahead=reads_ahead)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals as JSON, for a checkpoint."""
        self.peak_memory()
        return {name: getattr(self, name) for name in _STORED} | {
            "best": self.best.state_dict(),
            "data": self.data,
            "typical": None if self.typical is None else dataclasses.asdict(self.typical),
            "step_seconds": [step_s for step_s, _ in self.seconds],
            "data_seconds": [data_s for _, data_s in self.seconds],
        }

    def restore(self, restored: Restored) -> None:
        """Restore the totals from a checkpoint. Figures of a step's time, communication and memory are dropped if they
        would be different under this plan."""
        state, step = restored.run["account"], self.engine.steps
        for name in (
            "loss",
            "metrics",
            "evaluation",
            "evaluated_step",
            "epoch_end",
            "worlds",
            "failed_saves",
            "commits",
        ):
            setattr(self, name, state[name])
        dropped = self.best.load_state_dict(state["best"])
        if dropped and self.engine.world.rank == 0:
            print(dropped, flush=True)
        self.resumed, self.seconds_before = state["resumed"] + 1, state["total_s"]
        before = _setting(restored.origin | {"world_size": restored.ranks, "hardware": restored.hardware_before})
        after = _setting(origin_of(self.engine.plan) | {"hardware": restored.hardware})
        if before != after:
            self.worlds.append({"step": step, "from": before, "to": after})
        if (saved_by := restored.other_commit(self.commit)) is not None:
            self.commits.append({"step": step, "from": saved_by, "to": self.commit})
        self.commit = self.commit or state["commit"]
        self.since = state["since"] if restored.comparable else step
        self.checkpoint = str(restored.directory)
        if not restored.comparable:
            return
        self.memory, self.size = state["memory"], state["size"]
        if (typical := state["typical"]) is not None:
            kinds = {Collective(kind): Traffic(**traffic) for kind, traffic in typical["kinds"].items()}
            self.typical = CommStats(**{**typical, "kinds": kinds})
        self.seconds.extend(zip(state["step_seconds"], state["data_seconds"], strict=True))

    def forget_evaluations(self) -> None:
        """Drop what the evaluations of other held-out data have found."""
        self.best, self.evaluation, self.evaluated_step = BestEvaluation(self.engine.plan), {}, None
        self.other_held_out = True

    def epoch_over(self, step: int) -> bool:
        """Return whether what is due at an epoch's end is due after ``step``."""
        return self.epoch_end is not None and self.epoch_end <= step

    def summary(self, verdict: str) -> dict[str, Any]:
        """Return the content of summary.json. ``train/loss`` is of the last window; times are medians over full
        windows."""
        engine, sites = self.engine, self._batch.sites
        outer = engine.sites.summary(self._windows)
        summary: dict[str, Any] = {
            "verdict": verdict,
            "resumed": self.resumed,
            **({"worlds": self.worlds} if self.worlds else {}),
            **({"commit": self.commit} if self.commit else {}),
            **({"commits": self.commits} if self.commits else {}),
            "steps": engine.steps,
            "precision": engine.plan.precision.kind.value,
            "device": measured_device(device_model(engine.plan.cluster.device)),
            **({} if self.loss is None else {"train/loss": self.loss}),
            **self.metrics,
            **self.evaluation,
            **self.best.summary(engine.plan.paths, over=engine.over),
            "batch/global_size": (self.size or self._batch.global_size) * sites,
            "batch/micro_size": engine.plan.batch.micro_size,
            "progress/samples": engine.samples,
            "progress/items": engine.items,
            **outer,
            **self.peak_memory(),
            "amp/skipped_steps": engine.skipped_steps,
            "batch/empty_windows": engine.empty_windows,
            **({"batch/nonfinite_windows": engine.nonfinite_windows} if engine.nonfinite_windows else {}),
            "time/total_s": self.total_s,
            "checkpoint": self.checkpoint,
            "checkpoint/failed": self.failed_saves,
        }
        if self.typical is not None:
            summary["comm/wire_bytes"] = self.typical.wire_bytes
            summary["comm/wire_bytes_every"] = self.typical.wire_bytes_every
            summary["comm/saved_fraction"] = self.typical.saved_fraction
            summary["comm/time_s"] = self.typical.time_s
            if len(self.typical.kinds) > 1:
                for kind, traffic in self.typical.kinds.items():
                    summary[f"comm/{kind.value}/wire_bytes"] = traffic.wire_bytes
            summary["time/step_s"] = statistics.median(step_s for step_s, _ in self.seconds or self.warm_up_seconds)
            # outer steps are rare, and in no window's time
            together_s = summary["time/step_s"] + outer.get("outer/time_s", 0.0)
            summary["throughput/samples_per_s"] = summary["batch/global_size"] / together_s
        if self.size in (None, engine.plan.batch.global_size):  # a smaller window of batch.ramp is not predicted
            summary |= predicted_metrics(engine.plan)
        summary |= engine.stragglers.summary() | self.calibration()
        if (calibrated := engine.calibrated) is not None and calibrated.not_measured:
            summary["comm/not_measured"] = calibrated.not_measured
        return summary | engine.noise_scale.metrics()


def _setting(origin: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: f"batch.{name}" for name in ("micro_size", "accumulation")}
    keys |= {name: f"{name}.kind" for name in ("strategy", "precision")}
    return {name: origin[name] for name in ("world_size", "global_size", "hardware")} | {
        name: origin["time"][key] for name, key in keys.items()
    }
