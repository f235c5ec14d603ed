"""Tracker solver: which trackers a run has, and where they store it; what they need on this machine.

No tracker is imported here: its process does that, on the host of rank 0.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from launcher.config.choices import WandbMode
from launcher.config.schema import ClusterKind, Config, Tracker
from launcher.errors import ConfigError
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_names


class TrackerKind(NamedTuple):
    """Name of a tracker in messages, the module that it needs, and the extra of the launcher that installs it."""

    title: str
    module: str
    extra: str


TRACKER_KINDS: dict[Tracker, TrackerKind] = {
    Tracker.wandb: TrackerKind("W&B", "wandb", ""),
    Tracker.tensorboard: TrackerKind("TensorBoard", "tensorboard", "tensorboard"),
    Tracker.mlflow: TrackerKind("MLflow", "mlflow", "mlflow"),
    Tracker.trackio: TrackerKind("Trackio", "trackio", "trackio"),
    Tracker.prometheus: TrackerKind("Prometheus", "prometheus_client", "prometheus"),
}
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
    mlflow, tensorboard, prometheus = config.mlflow, config.tensorboard, config.prometheus
    if Tracker.mlflow in config.trackers and mlflow.tracking_uri is not None:
        mlflow = dataclasses.replace(mlflow, tracking_uri=_tracking_uri(mlflow.tracking_uri, cwd))
    if Tracker.prometheus in config.trackers and prometheus.port is None and prometheus.textfile is None:
        raise ConfigError(
            "trackers", [t.value for t in config.trackers], "prometheus has nothing to write to.",
            "Set prometheus.port, for a scrape endpoint, or prometheus.textfile, for the node exporter.",
        )  # fmt: skip
    name = f"{Path(run.dir).name}-{run.id}"
    if tensorboard.dir is not None:
        tensorboard = dataclasses.replace(tensorboard, dir=str((Path(cwd) / tensorboard.dir / name).resolve()))
    if prometheus.textfile is not None:
        file = (Path(cwd) / prometheus.textfile).resolve()
        file = file if file.suffix == ".prom" else file / f"{name}.prom"
        prometheus = dataclasses.replace(prometheus, textfile=str(file))
    return {
        "trackers": tuple(config.trackers),
        "tensorboard": tensorboard,
        "mlflow": mlflow,
        "trackio": config.trackio,
        "prometheus": prometheus,
    }


def _tracking_uri(uri: str, cwd: str) -> str:
    """Return the URI with an absolute path if it is a directory.

    Raises:
        ConfigError: MLflow knows no such URI, or it contains a password.
    """
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    if "@" in parts.netloc:
        raise ConfigError(
            "mlflow.tracking_uri", re.sub(r"//[^@]*@", "//***@", uri), "contains a password, which would be stored.",
            "Leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI.",
        )  # fmt: skip
    if scheme not in _MLFLOW_SCHEMES and not scheme.startswith("databricks"):
        raise ConfigError(
            "mlflow.tracking_uri", uri, f"MLflow has no store {scheme}://.",
            f"Allowed: a directory, or {first_names([f'{known}:' for known in _MLFLOW_SCHEMES if known], 9)}",
        )  # fmt: skip
    if scheme in ("http", "https") and not parts.hostname:
        raise ConfigError("mlflow.tracking_uri", uri, "names no server.", "Write http://HOST:PORT.")
    if scheme in ("", "file") and uri != "databricks":
        return str((Path(cwd) / parts.path).resolve())
    return uri


def mirrors_of(plan: RunPlan) -> tuple[Tracker, ...]:
    """Return the trackers that mirror the run's record: all that are listed, but W&B if it is disabled."""
    off = {Tracker.wandb} if plan.wandb.mode is WandbMode.disabled else set[Tracker]()
    return tuple(tracker for tracker in plan.trackers if tracker not in off)


def mlflow_uri(plan: RunPlan, env: Mapping[str, str]) -> str:
    """Return the tracking URI of a run. ``env``: environment of the tracker's process."""
    return plan.mlflow.tracking_uri or env.get("MLFLOW_TRACKING_URI") or str(Path(plan.run.dir).parent / "mlruns")


def require_trackers(config: Config) -> None:
    """Check what can be known before the start: packages, and for a job on this machine the port and the directory of
    Prometheus.

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
    if Tracker.prometheus not in config.trackers or config.cluster.kind is not ClusterKind.local:
        return
    if config.prometheus.port:
        _require_free(config.prometheus.port)
    if config.prometheus.textfile is not None:
        file = Path(config.prometheus.textfile)
        directory = file.absolute().parent if file.suffix == ".prom" else file
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            problem = "its directory does not exist." if not directory.is_dir() else "its directory is not writable."
            raise ConfigError("prometheus.textfile", str(file), problem)


def _require_free(port: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the endpoint itself does
        try:
            server.bind(("", port))
        except OSError as error:
            raise ConfigError(
                "prometheus.port", port, f"cannot be opened on this machine: {error.strerror}.",
                "Use another one, or 0 for any free port.",
            ) from None  # fmt: skip
