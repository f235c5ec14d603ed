"""Whatever kills `launch`, none of its helper processes outlives it: found by a mark in their environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import launch_command, patience
from tests.infra import warm
from tests.infra.runs import wait_for

pytestmark = pytest.mark.slow

MARK = "LAUNCHER_TEST_MARK"
TASK = Path(__file__).with_name("left_behind_task.py")
JOB = (
    "task._target_=left_behind_task.Task", "batch.global_size=8", "batch.micro_size=2", "precision=fp32",
    "cluster.grace_s=1", "run.calibrate_s=0", "wandb.mode=disabled",
)  # fmt: skip
# SIGKILL is the harder test; a SIGTERM that is handled must lead to the same end, and to no directory left behind
BY_SIGTERM = ("forecast", "verify")
# two runs whose records never end, read by as many processes
REPORT = """
from pathlib import Path
from launcher.extensions.page import report_command

if __name__ == "__main__":
    report_command._ALONE_BYTES = -1
    report_command.read_all([Path("first"), Path("second")])
"""


@dataclass
class Case:
    """``command``; ``helper``: in the command line of a helper that has to run before the launcher is killed, as often
    as ``count`` says; ``place``: where its task waits."""

    command: list[str]
    helper: str
    count: int = 1
    place: str = ""


def cases(directory: Path) -> dict[str, Case]:
    (directory / "report.py").write_text(REPORT)
    train = ["train.loader_workers=1", "task.waits=sample"]
    return {
        "task": Case(launch_command("plan", *JOB, "task.waits=construction"), "task_probe", place="construction"),
        "forecast": Case(
            launch_command("plan", *JOB, "strategy=fsdp", "task.waits=forecast"), "task_probe", place="forecast"
        ),
        "train": Case(
            launch_command("train", *JOB, *train, "wandb.mode=offline"), "trackers.mirror", place="sample"
        ),
        "verify": Case(launch_command("verify", *JOB, "task.waits=loss"), "verify.verify_worker", 2, place="loss"),
        "drill": Case(launch_command("drill", *JOB, *train), "train.worker", 2, place="sample"),
        "doctor": Case(launch_command("doctor"), "doctor.bandwidth", 2),
        "report": Case([sys.executable, "report.py"], "spawn_main", 2),
    }  # fmt: skip


def marked(value: str) -> dict[int, str]:
    """The command line of each living process that has inherited the mark."""
    found: dict[int, str] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_helper_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    values: dict[str, str] = {}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, case in cases(tmp_path).items():
            if number is signal.SIGTERM and name not in BY_SIGTERM:
                continue
            cwd, values[name] = tmp_path / name, uuid.uuid4().hex
            (cwd / "tmp").mkdir(parents=True)
            shutil.copy(TASK, cwd)
            for run in ("first", "second"):
                (cwd / run).mkdir()
                os.mkfifo(cwd / run / "metrics.jsonl")
            if name == "report":
                shutil.move(tmp_path / "report.py", cwd)
            env = {**os.environ, MARK: values[name], "TMPDIR": str(cwd / "tmp")}
            with (cwd / "output").open("wb") as output:
                job = warm.Popen(case.command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            started[name] = job

            def helps(case: Case = case, cwd: Path = cwd, value: str = values[name], job: object = job) -> bool:
                assert job.poll() is None, (cwd / "output").read_text()  # type: ignore[attr-defined]
                lines = [line for line in marked(value).values() if case.helper in line]
                return len(lines) >= case.count and (not case.place or any(cwd.glob(f"at {case.place} *")))

            wait_for(helps, f"the helpers of {name}", 240)
            job.send_signal(number)
            job.wait(patience(240))
            wait_for(lambda value=values[name]: not marked(value), f"the helpers of {name} to end", 120)
            if number is signal.SIGTERM:
                left = [path.name for path in (cwd / "tmp").iterdir() if path.name.startswith("launch-")]
                assert left == [], name
    finally:
        for job in started.values():
            job.kill()
        for value in values.values():
            for pid in marked(value):
                os.kill(pid, signal.SIGKILL)
