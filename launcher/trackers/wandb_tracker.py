"""Weights & Biases: a server, or files for `wandb sync`."""

from __future__ import annotations

import html
import json
import os
import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from launcher.config.choices import WandbMode
from launcher.config.schema import Config, Device
from launcher.errors import ConfigError
from launcher.plan.host import without_secrets
from launcher.plan.placement import SCRIPT_COMMAND
from launcher.plan.run_plan import RunPlan
from launcher.process import AGENT_PID
from launcher.rundir import code_snapshot
from launcher.rundir.files import read_json, write_line
from launcher.trackers.tracker import StepEntry, Tracker, library, sample_name

INIT_TIMEOUT_S = 30
_DIES_WITHIN_S = 10
_PART, _BLOCK, _WHOLE, _FIRST, _LAST = struct.Struct("<IHB"), 32768, 1, 2, 4  # of a file of W&B


def trial_of_wandb(env: Mapping[str, str]) -> str:
    """Return the sweep of W&B of which `wandb agent` has started this command as a trial; else nothing."""
    return env.get("WANDB_SWEEP_ID", "")


class WandbTracker(Tracker):
    """Weights & Biases. The library keeps what it was given, and sends or writes it in a process of its own.

    Online, the server drops repeated steps. Offline, that process buffers 32 KiB, and loses them if it is killed: the
    files of earlier starts say which steps were stored.
    """

    title, module, install = "W&B", "wandb", "pip install wandb"
    remedy = "Check WANDB_BASE_URL and WANDB_API_KEY, or set wandb.mode=offline."

    def __init__(self, plan: RunPlan, status: Mapping[str, Any]) -> None:
        super().__init__(plan, status)
        self._run: Any = None

    @classmethod
    def check(cls, config: Config, env: Mapping[str, str]) -> None:
        if trial_of_wandb(env) and config.wandb.mode is WandbMode.offline:
            raise ConfigError(
                "wandb.mode", "offline", f"sends no results to sweep {trial_of_wandb(env)}, whose trial this is.",
                "Add wandb.mode=online to the sweep's command, or leave the tracker out: trackers=[].",
            )  # fmt: skip

    @classmethod
    def destination(cls, plan: RunPlan, env: Mapping[str, str]) -> str:  # noqa: ARG003
        if plan.wandb.mode is WandbMode.disabled:
            return "disabled"
        return f"{plan.wandb.mode.value}, project {plan.wandb.project}, id {plan.run.id}"

    def open(self) -> dict[str, Any]:
        """Open the run; if the server cannot be reached, in offline mode."""
        import wandb

        problem, stored = None, self._stored_offline()
        try:
            run = self._init(self.plan.wandb.mode)
        except wandb.Error as error:
            if self.plan.wandb.mode is WandbMode.offline:
                raise
            sync = f"`wandb sync {Path(self.plan.run.dir, 'wandb', 'offline-run-*')}`"
            problem = f"W&B did not take the run ({error}). It is stored offline; {sync} uploads it later."
            wandb.teardown()
            run = self._init(WandbMode.offline)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run
        # online, the server knows the last step; steps stored offline by an earlier process have not reached it yet
        delivered = run.step - 1 if run.url else max(stored, self.status.get("delivered", 0))
        return {"delivered": delivered, "dir": str(Path(run.dir).parent), "url": run.url, "problem": problem}

    def _stored_offline(self) -> int:
        """Return the last step in the offline files of earlier starts; 0 if there is none."""
        # the second directory of a second has a number at its end
        files = [*Path(self.plan.run.dir).glob(f"wandb/offline-run-*/run-{self.plan.run.id}.wandb")]
        if files:
            _end_writers(files)  # they could still write what is delivered again here
        return max((last_step_in_wandb(file) for file in files), default=0)

    def _init(self, mode: WandbMode) -> Any:
        import wandb

        plan, commit = self.plan, self._commit()
        git: dict[str, Any] = {}
        if commit is not None:
            remote = code_snapshot.remote_of(Path(plan.cluster.cwd))
            git = {"git_commit": commit.partition("-dirty")[0], "git_remote_url": remote}
        # W&B would record the program and the arguments of this process
        command: list[str] = (read_json(plan.paths.plan) or {}).get("command", [])
        program, *arguments = command[len(SCRIPT_COMMAND) :] or [" ".join(command)]
        with patch.object(sys, "argv", [program, *arguments]):
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
                config=without_secrets(json.loads(plan.to_json())) | ({"commit": commit} if commit else {}),
                resume="allow" if mode is WandbMode.online else None,
                # no difference of the work tree is uploaded, and no output of this process
                settings=wandb.Settings(
                    init_timeout=INIT_TIMEOUT_S, console="off", disable_git=True, disable_code=True,
                    program=program, **self._system_settings(), **git,
                ),
            )  # fmt: skip

    def _system_settings(self) -> dict[str, Any]:
        """Return the settings for system metrics: of the agent and all below it, while the run is active."""
        agent = os.environ.get(AGENT_PID)
        if agent is None:
            return {"x_disable_stats": True}
        settings: dict[str, Any] = {"x_stats_pid": int(agent), "x_stats_track_process_tree": True}
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if self.plan.cluster.device is Device.cuda and all(map(str.isdecimal, gpus)):
            settings["x_stats_gpu_device_ids"] = [*map(int, gpus)]
        if self.plan.cluster.nodes > 1:
            settings["x_label"] = f"node {self.plan.node}, {socket.gethostname()}"
        return settings

    def _commit(self) -> str | None:
        """Return the commit of the directory in which the job was typed, unless the user has WANDB_DISABLE_GIT."""
        if os.environ.get("WANDB_DISABLE_GIT", "false").lower() != "false":
            return None
        cluster = self.plan.cluster
        return code_snapshot.commit_of(Path(cluster.import_from[0], "any"), cluster.copies)

    def log_output(self, lines: Sequence[str]) -> None:
        if os.environ.get("WANDB_CONSOLE") != "off":
            self._run.write_logs("\n".join(lines))

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
    import psutil

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
