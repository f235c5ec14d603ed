"""Real runs for the system tests: a stranger's project, its jobs as processes, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.process import AGENT_PID, RUN_ID
from tests.helpers import launch_command, patience, torchrun
from tests.infra import warm

PROJECT = Path(__file__).parent.parent / "user_project"
OWN = (
    "task._target_=speech.tasks.Tagger", "run.name=own", "precision=fp32", "wandb.mode=disabled",
    "batch.global_size=24", "batch.micro_size=3", "schedule=constant", "schedule.warmup_steps=0",
    "run.calibrate_s=0",  # its passes would be among those that a task in trouble counts
)  # fmt: skip
# what a shell exports that no file may contain
CANARY = "the-5ecret-of-a-shell"
MY_SETUP = "cluster.setup=['export MY_SETUP=1']"


def export_canary(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set MY_SECRET in the shell, and let the workers of a project print "canary" if they have it and MY_SETUP."""
    monkeypatch.setenv("MY_SECRET", CANARY)
    with (project / "speech" / "tasks.py").open("a") as file:
        file.write(f"""
import os
if os.environ.get("MY_SECRET", "")[4:] == {CANARY[4:]!r} and os.environ.get("MY_SETUP") == "1":
    print("canary")
""")


def files_with_canary(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if CANARY.encode() in file.read_bytes()]


def run_jobs(worker: Path, jobs: Sequence[Mapping[str, Any]], ranks: int, place: Path) -> str:
    """Run jobs in turn by a worker that reads them from a file in ``place``, and return what it prints."""
    (place / "jobs").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    return torchrun(worker, [str(place / "jobs")], ranks, place, timeout=400)


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that two runs of the same job share: all but times and memory."""
    of_comm = ("comm/time_s", "comm/step_s", "comm/speedup", "comm/exposed", "comm/ov", "comm/cal", "comm/not_measured")
    timed = ("time/", "throughput/", "memory/", "straggler", *of_comm)
    return {name: value for name, value in record.items() if not name.startswith(timed)}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def processes_of(run: Path) -> list[str]:
    """Command lines of every process that still belongs to a run."""
    others = (process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid())
    lines = (" ".join(process.info["cmdline"] or ()) for process in others)
    return [line for line in lines if str(run) in line]


def worker_of(run: Path, rank: int) -> psutil.Process:
    """The worker of a rank. Its parent is the agent."""
    run_id: str = json.loads((run / "plan.json").read_text())["run"]["id"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            environment = process.environ()
            own = environment.get(RUN_ID) == run_id and environment.get("RANK") == str(rank)
            if own and environment.get(AGENT_PID) == str(process.ppid()):
                return process
    raise KeyError(rank)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60, every_s: float = 0.05) -> None:
    """Wait until ``condition`` holds, on a fifth of a core at most: what is waited for needs the cores."""
    end = time.monotonic() + patience(seconds)
    began = time.thread_time()
    while not condition():
        assert time.monotonic() < end, f"waited {patience(seconds):.0f} s for {what}"
        time.sleep(max(every_s, 4 * (time.thread_time() - began)))
        began = time.thread_time()


def wait_for_steps(run: Path, steps: int, seconds: float = 60) -> None:
    """Wait until the run has recorded so many steps."""
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= steps, f"{steps} steps", seconds)


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    return warm.Popen(
        launch_command("train", *OWN, *arguments),
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
