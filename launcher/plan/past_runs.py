"""Past runs of this user: how long their steps took, beside how long they were predicted to take. They correct the
next prediction of a like job.

One line of a file in the user's cache directory for each run that has ended. A correction is the geometric mean of
measured / predicted over like runs, weighted by their likeness and shrunk towards 1. The predictions in it are those
without their own corrections, so that corrections do not act on themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.config.schema import ClusterKind, PrecisionKind
from launcher.plan.forecast import Forecast, StepTime
from launcher.plan.forecast_cache import locked, user_cache
from launcher.plan.host import device_model
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.rundir.files import object_from_json

# steady windows from which a run's median counts
LEAST_WINDOWS = 5
# bytes at the end of the file that are read: some thousand runs
READ_BYTES = 2 * 2**20
# runs at a correction of 1 that each correction is averaged with, and that each interval is
PRIOR_RUNS, PRIOR_SPREAD_RUNS = 1.0, 2.0
# quantile of the normal distribution that a 90% interval ends at
QUANTILE = 1.645
# a run that is less like the job than this does not count
LEAST_WEIGHT = 0.1
# properties that must be equal for two runs to have anything to do with each other
_REQUIRED = ("machine", "source")
# factor of the weight if a property differs, and for each doubling between two numbers
_IF_DIFFERENT = {"task": 0.3, "strategy": 0.5, "sync": 0.7, "precision": 0.3, "compile": 0.3, "several_hosts": 0.3}
_PER_DOUBLING = {"hosts": 0.8, "workers": 0.7, "parameters": 0.8, "micro_size": 0.9, "accumulation": 0.9}

Features = Mapping[str, Any]


def job_of(plan: RunPlan, source: str) -> Features:
    """Return the properties of a job by which it is compared with others, as JSON.

    Args:
        source: where the prediction comes from, ``StepTime.source``.
    """
    cluster, strategy, batch = plan.cluster, plan.strategy, plan.batch
    if cluster.gpu is not None:
        machine = cluster.gpu
    elif cluster.slurm is not None:
        machine = f"partition {cluster.slurm.options.get('partition', '')}"
    else:  # the hosts of a job are alike, or the slowest decides
        machine = device_model(cluster.device) if cluster.kind is not ClusterKind.elsewhere else "elsewhere"
    precision = plan.precision.kind
    if precision is PrecisionKind.auto:  # predicted as fp32
        precision = PrecisionKind.fp32
    return {
        "machine": machine,
        "source": source,
        "task": plan.task.target,
        "strategy": strategy.kind.value,
        "sync": strategy.sync.value,
        "precision": precision.value,
        "compile": plan.train.compile,
        "several_hosts": cluster.nodes > 1,
        "hosts": cluster.nodes,
        "workers": cluster.workers_per_node,
        "parameters": plan.task.parameters or 0,
        "micro_size": batch.micro_size,
        "accumulation": batch.accumulation,
    }


def likeness(job: Features, other: Features) -> float:
    """Return the weight of a run of the job ``other`` in the correction of ``job``: 1 for equal ones, 0 for others."""
    if any(job[name] != other[name] for name in _REQUIRED):
        return 0.0
    weight = math.prod(factor for name, factor in _IF_DIFFERENT.items() if job[name] != other[name])
    for name, factor in _PER_DOUBLING.items():
        weight *= factor ** abs(math.log2(max(1, job[name]) / max(1, other[name])))
    return weight if weight >= LEAST_WEIGHT else 0.0


@dataclass(frozen=True)
class PastRun:
    """Step of a run, in seconds. ``predicted_s``: without a correction. ``id``: of the run."""

    id: str
    job: Features
    predicted_s: float
    measured_s: float

    @classmethod
    def from_json(cls, line: str) -> Self | None:
        """Return the run in a line; None if the line is damaged, or of another version."""
        fields = object_from_json(line) or {}
        try:
            run = cls(fields["id"], dict(fields["job"]), float(fields["predicted_s"]), float(fields["measured_s"]))
            numbers = [run.predicted_s, run.measured_s, *(1 + run.job[name] for name in _PER_DOUBLING)]
            complete = {*_REQUIRED, *_IF_DIFFERENT} <= run.job.keys()
            return run if complete and all(math.isfinite(each) and each > 0 for each in numbers) else None
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class PastRuns:
    """Runs in the file. ``damaged``: lines of it that could not be read."""

    runs: tuple[PastRun, ...]
    damaged: int = 0

    @classmethod
    def load(cls) -> Self:
        """Return the newest runs of the user's file; of a run with several lines under one plan, the last."""
        try:
            with _file().open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - READ_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return cls(())
        if size > READ_BYTES:
            del lines[0]  # the end of a line
        runs, damaged = dict[str, PastRun](), 0
        for line in filter(None, lines):
            run = PastRun.from_json(line)
            if run is None:
                damaged += 1
            else:
                runs[json.dumps([run.id, run.job], sort_keys=True)] = run
        return cls(tuple(runs.values()), damaged)

    def corrected(self, plan: RunPlan, forecasts: Sequence[Forecast]) -> list[Forecast]:
        """Return the forecasts of the plan's policies with the time of their steps corrected by like runs."""

        def corrected(forecast: Forecast) -> Forecast:
            if forecast.step is None:
                return forecast
            under = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, sync=forecast.sync))
            job = job_of(under, forecast.step.source)
            ratios = [
                (weight, run.measured_s / run.predicted_s)
                for run in self.runs
                if (weight := likeness(job, run.job)) > 0
            ]
            return dataclasses.replace(forecast, step=corrected_step(forecast.step, ratios))

        return [corrected(forecast) for forecast in forecasts]

    @property
    def notes(self) -> list[str]:
        """A note on damaged lines, if there are any."""
        if not self.damaged:
            return []
        return [f"{_file()}: {count(self.damaged, 'damaged line')} ignored. Delete the file to forget all past runs."]


def corrected_step(step: StepTime, ratios: Sequence[tuple[float, float]]) -> StepTime:
    """Return a prediction without a correction, corrected by past runs.

    The logarithms of measured / predicted are taken as normally distributed around that of the correction. The spread
    that the prediction states itself counts as ``PRIOR_SPREAD_RUNS`` runs.

    Args:
        ratios: (weight, measured / predicted) of each run.
    """
    if not ratios:
        return step
    total = sum(weight for weight, _ in ratios)
    mean = sum(weight * math.log(ratio) for weight, ratio in ratios) / (total + PRIOR_RUNS)
    stated = math.log(step.high_s / step.low_s) / 2 / QUANTILE if step.low_s > 0 else 1.0
    scatter = sum(weight * (math.log(ratio) - mean) ** 2 for weight, ratio in ratios)
    variance = (PRIOR_SPREAD_RUNS * stated**2 + scatter) / (PRIOR_SPREAD_RUNS + total)
    half = QUANTILE * math.sqrt(variance * (1 + 1 / (total + PRIOR_RUNS)))  # of the next run, not of the mean
    parts = ("compute_s", "optimizer_s", "data_s", "communication_s", "exposed_s")
    return dataclasses.replace(
        step,
        **{name: getattr(step, name) * math.exp(mean) for name in parts},
        step_s=step.step_s * math.exp(mean),
        low_s=step.step_s * math.exp(mean - half),
        high_s=step.step_s * math.exp(mean + half),
        correction=math.exp(mean),
        past_runs=len(ratios),
    )


def store_run(plan: RunPlan, measured_s: float, windows: int) -> None:
    """Add a run to the user's file, if its plan has a step predicted on an idle machine and enough windows were
    measured.

    Args:
        measured_s: median step in seconds of full windows under this plan.
        windows: number of these windows.
    """
    forecast = plan.strategy.forecast
    if forecast is None or forecast.step is None or forecast.step.busy or windows < LEAST_WINDOWS:
        return
    step = forecast.step
    fields = {
        "id": plan.run.id,
        "job": job_of(plan, step.source),
        "predicted_s": step.step_s / step.correction,
        "measured_s": measured_s,
    }
    with suppress(OSError), locked(_file()) as file:  # a run must not fail because of it
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
        begin = b"" if not size or file.read(1) == b"\n" else b"\n"  # the line before was cut off
        file.write(begin + json.dumps(fields).encode() + b"\n")  # written at once when the file is closed


def _file() -> Path:
    return user_cache() / "past_runs.jsonl"
