"""Adapters of the trackers that store runs in a database or on a server: Weights & Biases and MLflow.

Each asks the store for its last step when it opens the run.
"""

from __future__ import annotations

import html
import json
import os
import re
import struct
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from launcher.config.choices import WandbMode
from launcher.plan.host import without_credentials, without_secrets
from launcher.plan.run_plan import RunPlan
from launcher.plan.tracker_plan import mlflow_uri
from launcher.report.tracker_entry import StepEntry, library, sample_name, settings_of
from launcher.rundir.files import write_line

INIT_TIMEOUT_S = 30
_DIES_WITHIN_S = 10
_PART, _BLOCK, _WHOLE, _FIRST, _LAST = struct.Struct("<IHB"), 32768, 1, 2, 4  # of a file of W&B


class WandbAdapter:
    """Weights & Biases. The library keeps what it was given, and sends or writes it in a process of its own.

    Online, the server drops repeated steps. Offline, that process buffers 32 KiB, and loses them if it is killed: the
    files of earlier starts say which steps were stored.
    """

    def __init__(self, plan: RunPlan, status: dict[str, Any]) -> None:
        self._plan, self._status = plan, status
        self._run: Any = None

    def open(self) -> dict[str, Any]:
        """Open the run; if the server cannot be reached, in offline mode."""
        import wandb

        problem, stored = None, self._stored_offline()
        try:
            run = self._init(self._plan.wandb.mode)
        except wandb.Error as error:
            if self._plan.wandb.mode is WandbMode.offline:
                raise
            sync = f"`wandb sync {Path(self._plan.run.dir, 'wandb', 'offline-run-*')}`"
            problem = f"W&B did not take the run ({error}). It is stored offline; {sync} uploads it later."
            wandb.teardown()
            run = self._init(WandbMode.offline)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        # online, the server knows the last step; steps stored offline by an earlier process have not reached it yet
        delivered = run.step - 1 if run.url else max(stored, self._status.get("delivered", 0))
        return {"delivered": delivered, "dir": str(Path(run.dir).parent), "url": run.url, "problem": problem}

    def _stored_offline(self) -> int:
        """Return the last step in the offline files of earlier starts; 0 if there is none."""
        # the second directory of a second has a number at its end
        files = [*Path(self._plan.run.dir).glob(f"wandb/offline-run-*/run-{self._plan.run.id}.wandb")]
        if files:
            _end_writers(files)  # they could still write what is delivered again here
        return max((last_step_in_wandb(file) for file in files), default=0)

    def _init(self, mode: WandbMode) -> Any:
        import wandb

        plan = self._plan
        return wandb.init(
            id=plan.run.id,
            name=plan.run.name,
            dir=plan.run.dir,
            mode=mode.value,
            project=plan.wandb.project,
            entity=plan.wandb.entity,
            group=plan.wandb.group,
            tags=plan.wandb.tags or None,  # None: use W&B's own environment variable
            notes=plan.wandb.notes,
            job_type=plan.wandb.job_type,
            config=without_secrets(json.loads(plan.to_json())),
            resume="allow" if mode is WandbMode.online else None,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", disable_git=True, disable_code=True),
        )

    def log(self, entries: Sequence[StepEntry]) -> None:
        for entry in entries:
            # committed at once: W&B also copies a row to its summary, which must not come after that of `finish`
            self._run.log({**entry.record, **wandb_media(entry)}, step=entry.step, commit=True)

    def finish(self, summary: dict[str, Any]) -> None:
        self._run.summary.update({name: value for name, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if summary.get("verdict") in ("done", "stopped") else 1)


def last_step_in_wandb(file: Path) -> int:
    """Return the last step in a file of W&B; 0 if there is none.

    Format: a header of 7 bytes, then LevelDB's log in blocks of 32 KiB. Each part of a record has a header: CRC (4
    bytes), length (2), kind (1): whole record, first, middle or last part. Each record is a Record of W&B's protocol.
    """
    record = library("wandb.proto.wandb_internal_pb2").Record
    data, at, parts, last = file.read_bytes(), 7, b"", 0
    while at + _PART.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _PART.size:  # padding
            at += left
            continue
        _, length, kind = _PART.unpack_from(data, at)
        start, at = at + _PART.size, at + _PART.size + length
        if not kind or at > len(data):  # its process was killed
            break
        parts = data[start:at] if kind in (_WHOLE, _FIRST) else parts + data[start:at]
        if kind in (_WHOLE, _LAST):
            stored = record.FromString(parts)
            if stored.HasField("history"):
                last = max(last, stored.history.step.num)
    return last


def _end_writers(files: Collection[Path]) -> None:
    """Kill the processes of W&B's library on this host that still write to ``files``: a tracker's process that was
    killed leaves one for a moment, and one that failed and starts again for longer."""
    paths = {str(file.resolve()) for file in files}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.name() == "wandb-core" and paths & {each.path for each in process.open_files()}:
                process.kill()
                process.wait(_DIES_WITHIN_S)


def wandb_media(entry: StepEntry) -> dict[str, Any]:
    """Return an entry's texts and images as W&B's."""
    if not entry.files:
        return {}
    import wandb

    media: dict[str, Any] = {}
    for file in entry.files:
        if file.suffix == ".txt":
            text = html.escape(entry.texts[sample_name(file)])
            media[sample_name(file)] = wandb.Html(f'<pre style="white-space: pre-wrap">{text}</pre>', inject=False)
            continue
        try:
            media[sample_name(file)] = wandb.Image(str(file))
        except wandb.Error as error:  # it needs Pillow
            write_line(f"{file} is not in W&B: {error}")
    return media


class MlflowAdapter:
    """MLflow: a server, a database or a directory.

    A delivery that was interrupted may be in the store in part: in order, because a batch is sent by step. So the
    newest step in the store is delivered again, without the metrics that have it.
    """

    # limits of log_batch, and of the length of a value
    METRICS_AT_ONCE, PARAMS_AT_ONCE, LONGEST_VALUE = 1000, 100, 500
    RUN_TAG = "launcher.run_id"

    def __init__(self, plan: RunPlan, status: dict[str, Any]) -> None:
        self._plan, self._status = plan, status
        self._uri = mlflow_uri(plan, os.environ)
        self._client: Any = None
        self._run_id = ""
        self._newest: dict[str, int] = {}  # step of the newest value of each metric when the run was opened

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
        experiment = self._client.get_experiment_by_name(self._plan.mlflow.experiment)
        if experiment is None:
            return None
        known = self._status.get("run_id", "")
        if local and known:
            # a process that was killed between creating and writing such a file leaves it empty: MLflow would not load
            # the run
            for file in Path(urlsplit(self._uri).path, experiment.experiment_id, known, "metrics").rglob("*"):
                if file.is_file() and not file.stat().st_size:
                    file.unlink()
        query = f"tags.`{self.RUN_TAG}` = '{self._plan.run.id}'"
        found = self._client.search_runs([experiment.experiment_id], query, max_results=1)
        return self._client.get_run(found[0].info.run_id) if found else None

    def _created(self) -> Any:
        plan, client = self._plan, self._client
        experiment = client.get_experiment_by_name(plan.mlflow.experiment)
        if experiment is None:
            try:
                client.create_experiment(plan.mlflow.experiment)
            except library("mlflow.exceptions").MlflowException:  # another run created it at the same time
                if client.get_experiment_by_name(plan.mlflow.experiment) is None:
                    raise
            experiment = client.get_experiment_by_name(plan.mlflow.experiment)
        created = int(datetime.fromisoformat(plan.run.created).timestamp() * 1000)
        tags = {self.RUN_TAG: plan.run.id, "launcher.dir": plan.run.dir, "launcher.version": plan.run.version}
        return client.create_run(experiment.experiment_id, start_time=created, tags=tags, run_name=plan.run.name)

    def _log_params(self, existing: dict[str, str]) -> None:
        """Log the settings. A parameter cannot change: one that a resume changed becomes a tag."""
        settings = {mlflow_name(k): str(v)[: self.LONGEST_VALUE] for k, v in settings_of(self._plan).items()}
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
