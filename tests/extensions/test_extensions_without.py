"""The core works without each extension: its folder is deleted, while the installation still names its entry points."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import CORPUS, ROOT, patience

EXTENSIONS = sorted(
    place.name for place in (ROOT / "launcher" / "extensions").iterdir() if (place / "README.md").exists()
)
SMALL = (
    CORPUS, "task.width=16", "task.heads=1", "task.depth=1", "task.seq_len=16", "task.eval_samples=32", "train.steps=3",
    "batch.global_size=8", "batch.micro_size=2", "cluster.workers_per_node=2", "cluster.device=cpu", "run.name=a",
    "run.calibrate_s=0",
)  # fmt: skip
COMMANDS = (
    ("--help",), ("keys", "batch"), ("plan", *SMALL), ("train", *SMALL), ("runs",), ("status", "a"), ("logs", "a"),
    ("resume", "a", "train.steps=4"), ("mirror", "a"),
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_core_works_without(extension: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("launcher", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "launcher" / "extensions" / extension)
    env = os.environ | {"PYTHONPATH": str(copy)}
    for words in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=patience(240),
        )  # fmt: skip
        assert done.returncode == 0, f"{words[0]}: {done.stdout}{done.stderr}"
