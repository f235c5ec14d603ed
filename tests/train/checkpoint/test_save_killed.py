"""kill -9 at random points inside a save: what is left can be loaded, and is never older than the last commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, patience
from tests.infra import warm


@pytest.mark.slow
@pytest.mark.parametrize("tries", [6, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_leaves_what_was_committed(tries: int, tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-m", "tests.train.checkpoint.kill_worker", str(tmp_path), str(tries), "7"],
        patience(600),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(rf"{tries} tries, (\d+) checkpoints, (\d+) kills left a part of one", done.stdout)
    assert said is not None, done.stdout
    assert int(said[1]) > tries
    assert int(said[2]) > tries // 3, "most kills come in the middle of a save"
