"""The wheel: installed without the checkout, it finds its conf/ and runs from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.slow


def test_the_wheel_works_from_any_directory(tmp_path: Path) -> None:
    built = tmp_path / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(ROOT)]
    subprocess.run(command, check=True)
    wheel = next(built.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "launcher/conf/config.yaml" in names
    assert {f"launcher/report/page/page.{kind}" for kind in ("html.j2", "css", "js")} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "jobs/"))]
    place = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(place)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = f"import launcher; assert launcher.__file__.startswith({str(place)!r})"
    check = f"{found}; from launcher.cli import main; main()"
    for arguments in (
        ["plan", "strategy=single"],
        ["train", "train.steps=2", "task.width=16", "task.heads=1", "task.depth=1", "wandb.mode=disabled"],
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", check, *arguments],
            cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert len(list((elsewhere / "runs").glob("*/checkpoints/step_000002"))) == 1
    report = [sys.executable, "-P", "-c", check, "report", "runs"]
    subprocess.run(report, cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(place)}, check=True)
    assert (elsewhere / "runs" / "report.html").exists()
