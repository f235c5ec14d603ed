"""Only the newest attempt of a run may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import Superseded
from launcher.rundir.fencing import Attempt, Fence
from launcher.rundir.paths import RunPaths


def test_a_later_one_shuts_the_earlier_ones_out(tmp_path: Path) -> None:
    old, new = (Fence(RunPaths(tmp_path), Attempt(0, restart)) for restart in (1, 2))
    old.claim(job="17")
    old.check()
    new.claim(job="17")
    with pytest.raises(Superseded, match=r"newer start of this run \(0\.2, "):
        old.check()
    with pytest.raises(Superseded):
        old.claim()
    assert new.newest() == {"incarnation": "0.2", "job": "17"}


def test_a_submission_by_hand_comes_after_every_restart_of_the_one_before(tmp_path: Path) -> None:
    restarted, resumed = Attempt(0, 11), Attempt(1, 0)
    assert restarted < resumed
    assert Attempt.parse(str(restarted)) == restarted
    Fence(RunPaths(tmp_path), resumed).claim()
    with pytest.raises(Superseded):
        Fence(RunPaths(tmp_path), restarted).check()
