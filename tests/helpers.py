"""Shared by the tests: plans without a command line, `launch` and torchrun as real processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.config.hydra import compose
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.task_inspection import InspectionRequest
from tests.infra import composition, warm

ROOT = Path(__file__).resolve().parent.parent
# how many times longer this machine takes than the one that the limits were chosen on; measured once by conftest.py
SLOWNESS = "LAUNCHER_TEST_SLOWNESS"
# of bytes_gpt: its own text, all of the standard library, takes each process a second to read
CORPUS = f"task.corpus={sysconfig.get_path('stdlib')}/asyncio"
# two cores serve several ranks here: more threads than cores only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
composition.install()
warm.install()
# a stranger's settings must not decide a test
for name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[name]


def make_plan(
    *overrides: str,
    samples: int | None = 1000,
    gradient_bytes: int | None = 4000,
    gpus: int = 0,
    run_dir: str = "/nowhere/run",
    batch_norms: int | None = None,
    task: TaskPlan | None = None,
) -> RunPlan:
    task = task or TaskPlan(
        target="some.Task",
        params={},
        samples=samples,
        parameters=1000,
        gradient_bytes=gradient_bytes,
        unit_parameters=800,
        batch_norms=batch_norms,
    )
    run = RunInfo(name="run", id="abcd1234", dir=run_dir, created="2024-01-01T00:00:00+00:00", version="0")
    return solve(compose(overrides), Site(gpus=gpus, cores=2, cwd="/nowhere"), task, run)


def inspection_of(target: str, *overrides: str, **params: object) -> InspectionRequest:
    """Return the request for an inspection of the task ``target(**params)`` of the job of ``overrides``."""
    config = compose(overrides)
    config.task = {"_target_": target, **params}
    return InspectionRequest.of(config, str(ROOT))


def slowness() -> float:
    """Return the factor by which limits that the product itself applies are stretched on this machine; at least 1."""
    return float(os.environ.get(SLOWNESS, "1"))


def patience(seconds: float) -> float:
    """Return the limit in seconds for a wait that takes ``seconds`` at most on a quiet machine.

    Waits end by what they wait for. The limit only ends a test whose condition never comes true, so it is generous, and
    at least a minute: a busy machine takes that long for what an idle one does at once.
    """
    return max(60, 4 * seconds) * slowness()


def launch_command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", "from launcher.cli import main; main()", *arguments]


def launch(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, status: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`launch ...` typed in ``cwd``. Fails the test if its status is not ``status``; None: any."""
    done = warm.run(
        launch_command(*arguments),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        timeout=patience(240),
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done


def series(some: int, whole: int) -> pytest.MarkDecorator:
    """Parametrize a test with ("some", its number of cases), and nightly with ("all", the number of all cases)."""
    return pytest.mark.parametrize(
        ("part", "cases"), [("some", some), pytest.param("all", whole, marks=pytest.mark.nightly)]
    )


def torchrun(
    script: Path, arguments: Sequence[str], ranks: int, cwd: Path, timeout: float = 240, *, status: int = 0
) -> str:
    """Run ``script`` on ``ranks`` real processes with gloo; its output. Fails the test if its status differs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = warm.run(
        [*command, "-m", "launcher.launch.script_worker", str(script), *arguments], patience(timeout), cwd=cwd
    )
    assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]  # the reason is at their end
    return done.stdout


def printed_by(script: Path, arguments: Sequence[str], ranks: int, cwd: Path) -> list[Any]:
    """Run ``script`` like ``torchrun``, and return the JSON objects that it prints."""
    lines = torchrun(script, arguments, ranks, cwd).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def shown(*renderables: object) -> str:
    """Return what a terminal of 160 columns shows."""
    out = io.StringIO()
    Console(file=out, width=160).print(*renderables)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
