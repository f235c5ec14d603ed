"""Tracker solver: which trackers a run has, and where they store it; what they need on this machine.

No tracker is imported here: its process does that, on the host of rank 0.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from launcher.config.choices import WandbMode
from launcher.config.schema import Config, Tracker
from launcher.errors import ConfigError
from launcher.plan.host import without_credentials
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_names
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths


class TrackerKind(NamedTuple):
    """Name of a tracker in messages, the module that it needs, and the extra of the launcher that installs it."""

    title: str
    module: str
    extra: str


TRACKER_KINDS: dict[Tracker, TrackerKind] = {
    Tracker.wandb: TrackerKind("W&B", "wandb", ""),
    Tracker.tensorboard: TrackerKind("TensorBoard", "tensorboard", "tensorboard"),
    Tracker.mlflow: TrackerKind("MLflow", "mlflow", "mlflow"),
}
MLFLOW_STORE = "mlruns"  # MLflow's default store, beside the directories of the runs
# schemes of a tracking URI; "": a directory
_MLFLOW_SCHEMES = (
    "", "file", "http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "uc",
)  # fmt: skip


def solve_trackers(config: Config, run: RunInfo, cwd: str) -> dict[str, Any]:
    """Return the plan's parts on trackers, by field: relative paths become absolute.

    Raises:
        ConfigError: a tracker is listed twice, or lacks a setting, or has a wrong one.
    """
    for number, tracker in enumerate(config.trackers):
        if tracker in config.trackers[:number]:
            raise ConfigError("trackers", [t.value for t in config.trackers], f"{tracker.value} is there twice.")
    mlflow, tensorboard = config.mlflow, config.tensorboard
    if mlflow.tracking_uri is not None:
        _require_no_credentials(mlflow.tracking_uri)
        if Tracker.mlflow in config.trackers:
            _require_store("mlflow.tracking_uri", mlflow.tracking_uri)
            mlflow = dataclasses.replace(mlflow, tracking_uri=_absolute(mlflow.tracking_uri, cwd))
    name = f"{Path(run.dir).name}-{run.id}"
    if tensorboard.dir is not None:
        tensorboard = dataclasses.replace(tensorboard, dir=str((Path(cwd) / tensorboard.dir / name).resolve()))
    return {"trackers": tuple(config.trackers), "tensorboard": tensorboard, "mlflow": mlflow}


def _require_no_credentials(uri: str) -> None:
    """Check that the URI, which is stored in several files, names neither a user nor a password.

    Raises:
        ConfigError: it does.
    """
    shown = without_credentials(uri)
    if shown != uri:
        raise ConfigError(
            "mlflow.tracking_uri", shown, "contains a user or a password, which would be stored.",
            "Leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI.",
        )  # fmt: skip


def _require_store(key: str, uri: str) -> None:
    """Check that MLflow knows such a URI.

    Raises:
        ConfigError: it does not.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(key, without_credentials(uri), f"is not a URI: {error}.") from None
    scheme = parts.scheme.partition("+")[0]
    if scheme not in _MLFLOW_SCHEMES and not scheme.startswith("databricks"):
        raise ConfigError(
            key, without_credentials(uri), f"MLflow has no store {scheme}://.",
            f"Allowed: a directory, or {first_names([f'{known}:' for known in _MLFLOW_SCHEMES if known], 9)}",
        )  # fmt: skip
    if scheme in ("http", "https") and not parts.hostname:
        raise ConfigError(key, without_credentials(uri), "names no server.", "Write http://HOST:PORT.")


def _absolute(uri: str, cwd: str) -> str:
    """Return the URI with an absolute path if it is a directory."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file") and uri != "databricks":
        return str((Path(cwd) / parts.path).resolve())
    return uri


def mirrors_of(plan: RunPlan) -> tuple[Tracker, ...]:
    """Return the trackers that mirror the run's record: all that are listed, but W&B if it is disabled."""
    off = {Tracker.wandb} if plan.wandb.mode is WandbMode.disabled else set[Tracker]()
    return tuple(tracker for tracker in plan.trackers if tracker not in off)


def recorded_trackers(paths: RunPaths) -> tuple[Tracker, ...]:
    """Return the trackers of a run's record, also if its plan cannot be read as one."""
    for file in (paths.plan, paths.loop_plan):
        fields = read_json(file) or {}
        if "batch" in fields:
            return trackers_of_plan(fields)
    return ()


def trackers_of_plan(fields: Mapping[str, Any]) -> tuple[Tracker, ...]:
    """Return the trackers in the JSON object of a plan with a batch."""
    listed = fields.get("trackers", ())
    return tuple(tracker for tracker in Tracker if tracker.value in listed)


def mlflow_uri(plan: RunPlan, env: Mapping[str, str]) -> str:
    """Return the tracking URI of a run. ``env``: environment of the tracker's process."""
    return plan.mlflow.tracking_uri or env.get("MLFLOW_TRACKING_URI") or str(Path(plan.run.dir).parent / MLFLOW_STORE)


def require_trackers(config: Config, env: Mapping[str, str]) -> None:
    """Check what can be known before the start: packages, and the variable with MLflow's address.

    Raises:
        ConfigError: something is missing.
    """
    if config.cluster.container is None:  # an image has packages of its own
        for tracker in config.trackers:
            kind = TRACKER_KINDS[tracker]
            if importlib.util.find_spec(kind.module) is None:
                raise ConfigError(
                    "trackers", [t.value for t in config.trackers], f"{kind.module} is not installed.",
                    f"Install it (pip install 'launcher[{kind.extra}]'), or leave {tracker.value} out.",
                )  # fmt: skip
    if Tracker.mlflow in config.trackers and config.mlflow.tracking_uri is None:
        _require_store("MLFLOW_TRACKING_URI", env.get("MLFLOW_TRACKING_URI", ""))
