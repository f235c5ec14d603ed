"""Config groups of the trackers, which are part of the schema (launcher/config/schema.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.config.choices import WandbMode


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, a mirror of metrics.jsonl."""

    mode: WandbMode = WandbMode.offline
    """offline: write files for `wandb sync`; online: upload live; disabled: off."""
    project: str = "launcher"
    """W&B project."""
    entity: str | None = None
    """W&B user or team. Default: that of the API key."""
    group: str | None = None
    """W&B group. Default: the sweep's name, else WANDB_RUN_GROUP."""
    tags: list[str] = field(default_factory=list[str])
    """W&B tags. Default: WANDB_TAGS."""
    notes: str | None = None
    """W&B notes, such as the purpose of the run. Default: WANDB_NOTES."""
    job_type: str | None = None
    """W&B job type, such as train, to filter runs by. Default: WANDB_JOB_TYPE."""


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig:
    """TensorBoard (trackers=[tensorboard]): event files."""

    dir: str | None = None
    """Parent directory of the run's event files, DIR/NAME-ID. Default: tensorboard/ in the run's directory."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """MLflow (trackers=[mlflow])."""

    tracking_uri: str | None = None
    """Server (http://HOST:PORT), directory, or database (sqlite:////PATH, postgresql://HOST/NAME). Without passwords:
    MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN are read from the environment.
    Default: MLFLOW_TRACKING_URI, else mlruns/ beside the run's directory."""
    experiment: str = "launcher"
    """MLflow experiment."""
