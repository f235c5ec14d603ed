"""Only the newest start of a run may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import Superseded
from launcher.launch.agent import open_attempt
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.paths import RunPaths


def test_a_later_one_shuts_the_earlier_ones_out(tmp_path: Path) -> None:
    old, new = (Fence(RunPaths(tmp_path), Incarnation(0, restart)) for restart in (1, 2))
    old.claim(job="17", attempt=0)
    old.check()
    new.claim(job="17", attempt=3)
    with pytest.raises(Superseded, match=r"A newer start of this run, attempt 3, has taken over"):
        old.check()
    with pytest.raises(Superseded):
        old.claim()
    assert new.newest() == {"incarnation": "0.2", "job": "17", "attempt": 3}


def test_a_submission_by_hand_comes_after_every_restart_of_the_one_before(tmp_path: Path) -> None:
    restarted, resumed = Incarnation(0, 11), Incarnation(1, 0)
    assert restarted < resumed
    assert Incarnation.parse(str(restarted)) == restarted
    Fence(RunPaths(tmp_path), resumed).claim()
    with pytest.raises(Superseded):
        Fence(RunPaths(tmp_path), restarted).check()


def test_attempts_are_numbered_once_whether_or_not_they_left_logs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    assert open_attempt(Fence(paths, Incarnation())) == 0
    assert open_attempt(Fence(paths, Incarnation(0, 1))) == 1, "the first one ended before its workers started"
    for attempt, ranks in ((1, 3), (2, 2), (4, 3)):  # torchrun started the workers again, at fewer hosts
        for rank in range(ranks):
            paths.rank_log(rank, attempt).touch()
    assert open_attempt(Fence(paths, Incarnation(1, 0))) == 5
    newest = [paths.newest_rank_log(rank).name for rank in (0, 2, 3)]
    assert newest == ["rank0.attempt4.log", "rank2.attempt4.log", "rank3.log"]
