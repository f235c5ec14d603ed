"""Files of checkpoints that are written and deleted, and errors of the disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import CheckpointFailed
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint.async_save import Saver
from launcher.train.checkpoint.save import Retention, Snapshot, delete_old, delete_partial, write
from launcher.train.world import World
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.mark.slow
def test_the_order_of_gradients_and_whose_clock_counts(tmp_path: Path) -> None:
    options = ["batch.global_size=16", "batch.micro_size=4", "train.steps=12", "precision=fp32"]
    torchrun(WORKER, [str(tmp_path), *options], 2, tmp_path)


def test_no_run_fails_for_what_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that somebody has open stays, under another name, and with it its directory."""
    paths, held = RunPaths(tmp_path), True
    rmtree = shutil.rmtree

    def reluctant(path: Path, ignore_errors: bool = False) -> None:
        if held and not ignore_errors:
            raise OSError("Directory not empty")
        if not held:
            rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", reluctant)
    fence = Fence(paths, Incarnation(0, 1))
    for _ in range(2):  # the same steps again, after a restart
        for step in (1, 2, 3, 4):
            paths.checkpoint(step).mkdir(parents=True, exist_ok=True)
            (paths.checkpoint(step) / "file").touch()
        delete_old(paths, fence, Retention(keep=2))
        assert [path.name for path in paths.committed_checkpoints()] == ["step_000004", "step_000003"]
    assert {attempt for attempt, _ in paths.partial_checkpoints()} == {"0.1"}
    delete_partial(paths, fence)
    assert len(paths.partial_checkpoints()) == 4
    held = False
    delete_old(paths, fence, Retention())
    assert {path.name for path in paths.checkpoints.iterdir()} == {"step_000003", "step_000004"}


def nothing_in(place: Path) -> Snapshot:
    return Snapshot(
        step=1, tensors={}, state="", world=World(0, 1, 0), fence=Fence(RunPaths(place), Incarnation(0, 1)),
        retention=Retention(), predicted_bytes=1 << 20,
    )  # fmt: skip


def test_a_wrong_path_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    RunPaths(tmp_path).checkpoints.touch()
    with pytest.raises(CheckpointFailed, match=r"Not a directory.*\n  That must be a directory to which") as caught:
        write(nothing_in(tmp_path))
    assert "were free" not in str(caught.value)


def test_dead_mount_is_a_failed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError in place of CheckpointFailed would leave the other ranks waiting for this rank's error."""
    stat = Path.stat

    def dead(path: Path, **how: Any) -> os.stat_result:
        if path.is_relative_to(tmp_path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", dead)
    with pytest.raises(CheckpointFailed, match=r"Stale file handle.*\n.*unknown number of bytes.*cannot be listed"):
        write(nothing_in(tmp_path))


def test_a_save_that_another_rank_has_ended_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    saver = object.__new__(Saver)
    saver._thread = None
    saver._error = RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [::1]:4711\nframe #0: c10::Error")
    saver.finish()
    assert capsys.readouterr().out == (
        "The checkpoint in progress was not written: this rank lost the connection to another rank, which has ended or "
        "cannot be reached: Connection closed by peer [::1]:4711\n"
    )
