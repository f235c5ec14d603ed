"""Totals over all attempts of a run, for summary.json. Checkpoints carry them from one attempt to the next."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from launcher.plan.host import device_model, measured_device
from launcher.plan.run_plan import predicted_metrics
from launcher.plan.sync_policy import Collective
from launcher.plan.windows import WARM_UP_WINDOWS
from launcher.train.checkpoint.best_evaluation import BestEvaluation
from launcher.train.checkpoint.load import Restored
from launcher.train.checkpoint.origin import origin_of
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
           "failed_saves", "total_s", "evaluated_step")  # fmt: skip


class RunTotals:
    """Totals of one run, updated by every rank after each window.

    Attributes:
        loss: mean loss of the last window with items; None before there is one.
        metrics: last averages of the loss's metrics and named terms; None for one that was not finite.
        evaluation: metrics of the last evaluation; None for one that was not finite.
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
        for name in ("loss", "metrics", "evaluation", "evaluated_step", "worlds", "failed_saves", "commits"):
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
