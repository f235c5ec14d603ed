"""The wheel in an empty environment: what it declares is all that it needs, and it runs from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.slow

SMALL = ("task.width=16", "task.heads=1", "task.depth=1", "task.seq_len=16", "task.eval_samples=32")
BATCH = ("batch.global_size=8", "batch.micro_size=2", "cluster.workers_per_node=2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    built = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(ROOT)]
    subprocess.run(command, check=True)
    return next(built.glob("*.whl"))


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"launcher/conf/config.yaml", "launcher/py.typed"} <= {*names}
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert {f"launcher/report/page.{kind}" for kind in ("html.j2", "css", "js")} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "jobs/"))]
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "launcher").rglob("*.py")}
    assert modules <= {*names}, "hatchling leaves out what .gitignore names"


def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Only with what the wheel declares: a package that the tests bring along once hid a missing one."""
    venv, place = tmp_path / "venv", tmp_path / "elsewhere"
    place.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    # compiling all of torch takes a minute, and most of it is never imported here
    install = [str(venv / "bin/pip"), "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "torch"], check=True)  # first: where a CPU build is at hand, its pin finds it
    subprocess.run([*install, str(wheel)], check=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def launch(*arguments: str) -> str:
        done = subprocess.run(
            [str(venv / "bin/launch"), *arguments],
            cwd=place, env=plain, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job = (*SMALL, *BATCH)
    assert "global batch" in launch("plan", *job)
    launch("train", *job, "train.steps=2", "run.name=first", "wandb.mode=offline")
    assert (place / "runs/first/checkpoints/step_000002/.metadata").exists()
    resumed = launch("resume", "first", "train.steps=4")
    assert "Numpy" not in resumed
    assert (place / "runs/first/checkpoints/step_000004/.metadata").exists()
    assert "Verdict" in launch("verify", *job)
    launch("train", "-m", *job, "batch.accumulation=1,2", "batch.global_size=null", "train.steps=2", "sweep.name=grid")
    assert "grid" in launch("runs", "grid")
    launch("report", "runs")
    assert (place / "runs/report.html").exists()
