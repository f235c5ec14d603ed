"""`launch logs`: all attempts of a rank, to their last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import runs
from launcher.report.live import LogFollower, rank_logs
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan


def test_last_words_without_an_end_of_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.logs.mkdir(parents=True)
    make_plan(run_dir=str(paths.root)).save()
    source = rank_logs(paths, 0)
    following = LogFollower(source)
    first, second = paths.rank_log(0), paths.rank_log(0, 1)
    first.write_text("step 1\nSegmentation fau")
    following.refresh()
    assert capsys.readouterr().out == "step 1\n", "somebody may still be writing it"
    with first.open("a") as file:
        file.write("lt")
    second.write_text("again\nBus err")
    following.refresh()
    assert capsys.readouterr().out == "Segmentation fault\n--- rank0.attempt1.log ---\nagain\n"
    with second.open("a") as file:
        file.write("or")
    following.refresh()
    assert capsys.readouterr().out == ""
    following.close()
    assert capsys.readouterr().out == "Bus error\n"
    runs.launch_logs(["run", "--dir", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        "step 1", "Segmentation fault", "--- rank0.attempt1.log ---", "again", "Bus error",
    ]  # fmt: skip
