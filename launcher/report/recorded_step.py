"""Measured steps of finished runs, for the plan of the same job on the same hardware."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterKind, Device, PrecisionKind
from launcher.errors import UserError
from launcher.plan.host import device_model
from launcher.plan.run_plan import RunPlan, part
from launcher.quantities import duration_text, seconds_text
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths

MOST_RUNS = 100  # newest runs that are looked at


@dataclass(frozen=True)
class RecordedStep:
    """Median step of the finished run ``run``, and the duration of a planned run with that step.

    Attributes:
        total_s: all steps; None if their number is unknown, or with a batch ramp.
        gpu_hours: of all ranks; None on CPUs, and without ``total_s``.
    """

    run: str
    step_s: float
    total_s: float | None
    gpu_hours: float | None

    @property
    def text(self) -> str:
        """Line of the plan's table."""
        whole = "" if self.total_s is None else f"; the whole run {duration_text(self.total_s)}"
        hours = "" if self.gpu_hours is None else f", {self.gpu_hours:,.3g} GPU-hours"
        return f"{seconds_text(self.step_s)} a step, measured in {self.run}{whole}{hours}"


class RecordedSteps:
    """Measured steps of the finished runs in the directory ``folder``, the value of ``run.dir``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _runs(self) -> list[tuple[RunPlan, str, float]]:
        """Plan, device and median step of each run, the newest first."""
        found: list[tuple[RunPlan, str, float]] = []
        for folder in sorted(self._folder.glob("*"), key=_changed_at, reverse=True)[:MOST_RUNS]:
            paths = RunPaths(folder)
            try:
                summary = read_json(paths.summary) or {}
                if summary.get("verdict") == "done":
                    found.append((RunPlan.load(paths.plan), summary["device"], float(summary["time/step_s"])))
            except (UserError, OSError, ValueError, KeyError, TypeError):  # damaged, or of another version
                continue
        return found

    def step_of(self, plan: RunPlan) -> RecordedStep | None:
        """Return the step of the newest finished run of the same job on the same hardware; None without one."""
        if plan.cluster.gpu is not None or plan.cluster.kind == ClusterKind.elsewhere:
            return None
        device = device_model(plan.cluster.device)
        for run, measured_on, step_s in self._runs:
            if measured_on == device and _job(run, run.precision.kind) == _job(plan, run.precision.kind):
                steps = None if plan.batch.ramp else plan.train.steps
                total_s = None if steps is None else steps * step_s
                hours = None
                if total_s is not None and plan.cluster.device is Device.cuda:
                    hours = total_s * plan.cluster.world_size / 3600
                return RecordedStep(run.run.name, step_s, total_s, hours)
        return None


def _job(plan: RunPlan, decided: PrecisionKind) -> dict[str, Any]:
    """Return all that must be equal for steps to take equally long.

    Args:
        decided: number format that precision=auto became.
    """
    cluster = plan.cluster
    kind = decided if plan.precision.kind is PrecisionKind.auto else plan.precision.kind
    partition = None if cluster.slurm is None else cluster.slurm.options.get("partition")
    return part(plan, "time") | {"place": (cluster.kind, partition), "precision.kind": kind.value}


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
