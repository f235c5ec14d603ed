"""MLflow: a server, a database or a directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.config.schema import Config
from launcher.errors import ConfigError, without_credentials
from launcher.extensions.trackers.tracker_keys import MlflowConfig
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_names
from launcher.trackers.tracker import StepEntry, Tracker, library, settings_of

# schemes of a tracking URI; "": a directory
_SCHEMES = (
    "", "file", "http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "uc",
)  # fmt: skip


class MlflowTracker(Tracker):
    """MLflow: a server, a database or a directory.

    A delivery that was interrupted may be in the store in part: in order, because a batch is sent by step. So the
    newest step in the store is delivered again, without the metrics that have it.
    """

    # limits of log_batch, and of the length of a value
    METRICS_AT_ONCE, PARAMS_AT_ONCE, LONGEST_VALUE = 1000, 100, 500
    RUN_TAG = "launcher.run_id"

    title, module, install = "MLflow", "mlflow", "pip install 'samebatch[mlflow]'"
    remedy = (
        "Check mlflow.tracking_uri, or the variables MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME with "
        "MLFLOW_TRACKING_PASSWORD, and MLFLOW_TRACKING_TOKEN."
    )

    def __init__(self, plan: RunPlan, status: Mapping[str, Any]) -> None:
        super().__init__(plan, status)
        self._uri = mlflow_uri(plan, os.environ)
        self._client: Any = None
        self._run_id = ""
        self._newest: dict[str, int] = {}  # step of the newest value of each metric when the run was opened

    @classmethod
    def check(cls, config: Config, env: Mapping[str, str]) -> None:
        uri = config.extension(MlflowConfig).tracking_uri
        if uri is None:
            _require_store("MLFLOW_TRACKING_URI", env.get("MLFLOW_TRACKING_URI", ""))
        else:
            _require_store("mlflow.tracking_uri", uri)

    @classmethod
    def destination(cls, plan: RunPlan, env: Mapping[str, str]) -> str:
        return f"{without_credentials(mlflow_uri(plan, env))}, experiment {plan.extension(MlflowConfig).experiment}"

    def open(self) -> dict[str, Any]:
        """Open the run with this id as a tag, or create it. Its settings are parameters."""
        local = urlsplit(self._uri).scheme in ("", "file")
        if local:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow refuses it otherwise
        # the process itself tries again, from the last step that arrived; MLflow would for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        self._client = library("mlflow").MlflowClient(self._uri)
        run = self._existing(local=local) or self._created()
        self._run_id = run.info.run_id
        self._newest = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        if run.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(run.data.params)
        where = {"dir": self._uri} if local else {"url": self._uri_of_run(run.info.experiment_id)}
        delivered = max(self._newest.values(), default=0) - 1
        return {"delivered": max(0, delivered), "run_id": self._run_id, **where}

    def _uri_of_run(self, experiment: str) -> str:
        parts = urlsplit(self._uri)
        if parts.scheme not in ("http", "https"):
            return without_credentials(self._uri)
        server = without_credentials(self._uri, "").rstrip("/")
        return f"{server}/#/experiments/{experiment}/runs/{self._run_id}"

    def _existing(self, *, local: bool) -> Any:
        """Return the run that an earlier process created in this store; None without one."""
        experiment = self._client.get_experiment_by_name(self.plan.extension(MlflowConfig).experiment)
        if experiment is None:
            return None
        known = self.status.get("run_id", "")
        if local and known:
            # a process that was killed between creating and writing such a file leaves it empty: MLflow would not load
            # the run
            for file in Path(urlsplit(self._uri).path, experiment.experiment_id, known, "metrics").rglob("*"):
                if file.is_file() and not file.stat().st_size:
                    file.unlink()
        query = f"tags.`{self.RUN_TAG}` = '{self.plan.run.id}'"
        found = self._client.search_runs([experiment.experiment_id], query, max_results=1)
        return self._client.get_run(found[0].info.run_id) if found else None

    def _created(self) -> Any:
        plan, client = self.plan, self._client
        experiment = client.get_experiment_by_name(plan.extension(MlflowConfig).experiment)
        if experiment is None:
            try:
                client.create_experiment(plan.extension(MlflowConfig).experiment)
            except library("mlflow.exceptions").MlflowException:  # another run created it at the same time
                if client.get_experiment_by_name(plan.extension(MlflowConfig).experiment) is None:
                    raise
            experiment = client.get_experiment_by_name(plan.extension(MlflowConfig).experiment)
        created = int(datetime.fromisoformat(plan.run.created).timestamp() * 1000)
        tags = {self.RUN_TAG: plan.run.id, "launcher.dir": plan.run.dir, "launcher.version": plan.run.version}
        return client.create_run(experiment.experiment_id, start_time=created, tags=tags, run_name=plan.run.name)

    def _log_params(self, existing: dict[str, str]) -> None:
        """Log the settings. A parameter cannot change: one that a resume changed becomes a tag."""
        settings = {mlflow_name(k): str(v)[: self.LONGEST_VALUE] for k, v in settings_of(self.plan).items()}
        new = [
            library("mlflow.entities").Param(name, value) for name, value in settings.items() if name not in existing
        ]
        for start in range(0, len(new), self.PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[start : start + self.PARAMS_AT_ONCE])
        for name, value in settings.items():
            if existing.get(name, value) != value:
                self._client.set_tag(self._run_id, f"changed.{name}", value)

    def log(self, entries: Sequence[StepEntry]) -> str | None:
        metric, problem = library("mlflow.entities").Metric, None
        for entry in entries:
            problem = self._log_samples(entry) or problem
        metrics = [
            metric(key, value, int(entry.at * 1000), entry.step)
            for entry in entries
            for key, value in ((mlflow_name(name), value) for name, value in entry.numbers.items())
            if entry.step > self._newest.get(key, -1)
        ]
        for start in range(0, len(metrics), self.METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + self.METRICS_AT_ONCE])
        return problem

    def _log_samples(self, entry: StepEntry) -> str | None:
        """Store texts and images as artifacts, under fixed names; return why that failed."""
        try:
            for file in entry.files:
                self._client.log_artifact(self._run_id, str(file), f"samples/{file.parent.name}")
            for name, text in entry.texts.items():
                if not name.startswith("samples/"):
                    self._client.log_text(self._run_id, text, f"texts/step_{entry.step:06d}/{mlflow_name(name)}.txt")
        except Exception as error:  # the artifacts may be stored elsewhere, such as on S3
            return f"MLflow's artifact store does not take samples ({type(error).__name__}); the metrics are stored."
        return None

    def finish(self, summary: dict[str, Any]) -> None:
        verdict = summary.get("verdict", "killed")
        for name, value in summary.items():
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value)
                # a directory as the store cannot have the tags a and a/b
                tag = f"summary.{mlflow_name(name)}".replace("/", ".")
                self._client.set_tag(self._run_id, tag, text[: self.LONGEST_VALUE])
        status = {"done": "FINISHED", "failed": "FAILED"}.get(verdict, "KILLED")
        self._client.set_terminated(self._run_id, status)


def mlflow_name(name: str) -> str:
    """Return a metric's name with the characters that MLflow refuses as _HEX. It also refuses paths such as a//b."""
    name = re.sub(r"[^\w\-. :/]", lambda match: f"_{ord(match[0]):x}", name)
    return name if os.path.normpath(name) == name and not name.startswith((".", "/")) else name.replace("/", "_2f")


def mlflow_uri(plan: RunPlan, env: Mapping[str, str]) -> str:
    """Return the tracking URI of a run; an absolute path if it is a directory.

    Args:
        env: environment of the tracker's process.
    """
    uri = plan.extension(MlflowConfig).tracking_uri
    if uri is None:
        return env.get("MLFLOW_TRACKING_URI") or str(Path(plan.run.dir).parent / "mlruns")
    parts = urlsplit(uri)
    if parts.scheme in ("", "file") and uri != "databricks":
        return str((Path(plan.cluster.cwd) / parts.path).resolve())
    return uri


def _require_store(key: str, uri: str) -> None:
    """Check that MLflow knows such a URI."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(key, uri, f"is not a URI: {error}.") from None
    scheme = parts.scheme.partition("+")[0]
    if scheme not in _SCHEMES and not scheme.startswith("databricks"):
        raise ConfigError(
            key, uri, f"MLflow has no store {scheme}://.",
            f"Allowed: a directory, or {first_names([f'{known}:' for known in _SCHEMES if known], 9)}",
        )  # fmt: skip
    if scheme in ("http", "https") and not parts.hostname:
        raise ConfigError(key, uri, "names no server.", "Write http://HOST:PORT.")
