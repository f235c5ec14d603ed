"""Choice of one of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.rundir.checkpoints import choose_checkpoint
from launcher.rundir.paths import RunPaths


def test_a_step_and_the_best_are_two_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only one can be chosen"):
        choose_checkpoint(RunPaths(tmp_path), step=5, best=True)
