"""Registry of GPU acceptance checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
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
class Environment:
    """Environment of a check. ``device``: cpu or cuda. ``folder``: the check's own."""

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

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

    def train(self, *overrides: str, workers: int = 1, status: int = 0, share: bool = True, **env: str) -> str:
        """Run `launch train` of JOB. ``share``: several workers share one GPU."""
        fixed = (f"run.dir={self.folder / 'runs'}", f"cluster.device={self.device}")
        if workers > 1 and self.on_gpu and share:
            env["LAUNCHER_SHARE_GPU"] = "1"
        keys = {override.partition("=")[0] for override in overrides}
        job = [override for override in JOB if override.partition("=")[0] not in keys]
        job += [*fixed, f"cluster.workers_per_node={workers}", *overrides]
        return self.launch("train", *job, status=status, **env)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.run / "events.jsonl").read_text().splitlines()]

    def log(self, rank: int = 0) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "logs").glob(f"rank{rank}.*log")))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|Error|failed", line)]
    return (errors or lines or ["no output"])[-1][:300]


def need_cuda(environment: Environment) -> None:
    if not environment.on_gpu:
        raise Skip("needs a GPU")


def missing_compiler(environment: Environment) -> str:
    """Return what torch.compile lacks on this machine, or nothing."""
    from launcher.config.schema import Device
    from launcher.plan.host import missing_for_compiling

    if environment.on_gpu and find_spec("triton") is None:
        return "triton is not installed"
    return missing_for_compiling(Device(environment.device), os.environ)


@dataclass(frozen=True)
class Check:
    """Check of the acceptance: ``function`` returns the figure, and raises if the check fails.

    Attributes:
        bound: limit on the figure, for the table.
        seconds: time limit.
        alone: whether it measures time or memory, and therefore runs alone.
        selftest: whether it verifies that failures are reported; such a check runs only if --only names it.
    """

    function: Callable[[Environment], str]
    bound: str
    seconds: float
    alone: bool
    selftest: bool


CHECKS: dict[str, Check] = {}


def check(
    name: str, bound: str, *, seconds: float = 90, alone: bool = False, selftest: bool = False
) -> Callable[[Callable[[Environment], str]], Callable[[Environment], str]]:
    """Register a check under ``name``; the other arguments are those of ``Check``."""

    def register(function: Callable[[Environment], str]) -> Callable[[Environment], str]:
        CHECKS[name] = Check(function, bound, seconds, alone, selftest)
        return function

    return register


@check("selftest fails", "fails", selftest=True)
def fails(environment: Environment) -> str:
    environment.launch("train", "no.such.key=1")
    return "unreachable"


@check("selftest sleeps", "fails", seconds=0.5, selftest=True)
def sleeps(environment: Environment) -> str:  # noqa: ARG001
    subprocess.run(["sleep", "3600"], check=False)
    return "unreachable"


@check("selftest dies", "fails", selftest=True)
def dies(environment: Environment) -> str:  # noqa: ARG001
    os.abort()


@check("selftest lingers", "ends", selftest=True)
def lingers(environment: Environment) -> str:  # noqa: ARG001
    threading.Thread(target=time.sleep, args=(3600,)).start()  # the interpreter would wait for it
    return "done"
