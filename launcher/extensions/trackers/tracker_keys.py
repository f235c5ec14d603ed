"""Config keys of the trackers: the groups tensorboard and mlflow."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.key_facts import PATH, Bound, key
from launcher.errors import without_credentials


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """TensorBoard (trackers=[tensorboard]): event files."""

    dir: str | None = key(None, PATH, affects="")
    """Parent directory of the run's event files, DIR/NAME-ID. Default: tensorboard/ in the run's directory."""


def _has_no_credentials(uri: str) -> bool:
    return without_credentials(uri) == uri


_WITHOUT_CREDENTIALS = Bound(
    _has_no_credentials,
    "contains a user or a password, which would be stored.\n  Leave it out, and set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI.",
)


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """MLflow (trackers=[mlflow])."""

    tracking_uri: str | None = key(None, _WITHOUT_CREDENTIALS, affects="")
    """Server (http://HOST:PORT), directory, or database (sqlite:////PATH, postgresql://HOST/NAME). Without passwords:
    MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN are read from the environment.
    Default: MLFLOW_TRACKING_URI, else mlruns/ beside the run's directory."""
    experiment: str = key("launcher", affects="")
    """MLflow experiment."""
