"""Config groups of runs and sweeps, which are part of the schema (launcher/config/schema.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and directory of the run, calibration."""

    name: str | None = None
    """Name of its directory. Default: the task's name, the time and four random characters."""
    dir: str = "runs"
    """Parent of the run directories."""
    calibrate_s: float | None = None
    """Maximum seconds of the calibration before training, which measures the first window's micro-batches with
    sync=every, with the job's own policy and without communication: the speed-up and the exposed communication.
    0: never. Default: 15, and no more than a tenth of the predicted run time."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs from one command (-m)."""

    name: str | None = None
    """Name of its directory, and W&B group. Default: the task's name and a digest of the command, so that the same
    command continues the same sweep."""
    at_once: int | None = None
    """slurm: cells of one array that run at the same time. Default: no limit."""
    objective: str | None = None
    """Result that a sweeper which learns from results, such as Optuna's, receives for a cell: a number in its
    summary.json, such as eval/accuracy; or best, the best value of checkpoint.best. Default: eval/loss if there is
    one, else train/loss."""
