"""Registry of GPU acceptance checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, GLOBAL = 6, 24
JOB = (
    "task._target_=jobs.gpu.tasks.Words", "wandb.mode=disabled", f"batch.global_size={GLOBAL}", f"train.steps={STEPS}",
    "schedule=constant", "schedule.warmup_steps=0", "train.log_every=1", "run.name=run",
)  # fmt: skip


class Skip(Exception):
    """Error of a check that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Place:
    """Environment of a check. ``device``: cpu or cuda. ``folder``: the check's own. ``limit_s``: its time limit."""

    device: str
    folder: Path
    limit_s: float

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def launch(self, *arguments: str, status: int = 0, **env: str) -> str:
        """Run `launch ARGUMENTS` and return its output.

        Raises:
            AssertionError: it exited with a status other than ``status``.
        """
        command = [sys.executable, "-P", "-c", "from launcher.cli import main; main()", *arguments]
        print("$ launch", *arguments, flush=True)
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **env}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(done.stdout, flush=True)
        if done.returncode != status:
            raise AssertionError(f"exit status {done.returncode}, not {status}: {last_line(done.stdout)}")
        return done.stdout

    def train(self, *overrides: str, workers: int = 1, status: int = 0, **env: str) -> str:
        """Run `launch train` of JOB; several workers share the GPU."""
        where = (f"run.dir={self.folder / 'runs'}", f"cluster.device={self.device}")
        if workers > 1 and self.device == "cuda":
            env["LAUNCHER_SHARE_GPU"] = "1"
        given = {override.partition("=")[0] for override in overrides}
        job = [word for word in JOB if word.partition("=")[0] not in given]
        words = (*job, *where, f"cluster.workers_per_node={workers}", *overrides)
        return self.launch("train", *words, status=status, **env)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def log(self, rank: int = 0) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "logs").glob(f"rank{rank}.*log")))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|Error|failed", line)]
    return (errors or lines or ["no output"])[-1][:300]


def need_cuda(place: Place) -> None:
    if place.device != "cuda":
        raise Skip("needs a GPU")


CHECKS: dict[str, Callable[[Place], str]] = {}
# checks that measure time or memory and therefore run alone
ALONE: set[str] = set()
SECONDS: dict[str, float] = {}


def check(name: str, *, seconds: float = 90, alone: bool = False) -> Callable[[Callable[[Place], str]], Any]:
    """Register a check under ``name``. ``seconds``: its time limit."""

    def register(function: Callable[[Place], str]) -> Callable[[Place], str]:
        CHECKS[name], SECONDS[name] = function, seconds
        if alone:
            ALONE.add(name)
        return function

    return register
