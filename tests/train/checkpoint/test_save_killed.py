"""kill -9 at random points inside a save: what is left can be loaded, and is never older than the last commit.

`python -m tests.train.checkpoint.kill_worker --tries 100` is the long one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, patience


@pytest.mark.slow
@pytest.mark.parametrize("tries", [10, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_leaves_what_was_committed(tries: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.checkpoint.kill_worker", "--tries", str(tries),
         "--seed", "7", "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=patience(600), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(rf"{tries} tries, (\d+) checkpoints, (\d+) kills left a part of one", done.stdout)
    assert said is not None, done.stdout
    assert int(said[1]) > tries
    assert int(said[2]) > tries // 3, "most kills come in the middle of a save"
