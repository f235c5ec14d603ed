"""`launch logs`: all attempts of a rank, to their last words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli import runs
from launcher.report.live import LiveLog, LogFollower, rank_logs
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


def test_the_whole_log_and_the_steps_of_a_run_elsewhere(tmp_path: Path) -> None:
    plan = make_plan("train.steps=3", run_dir=str(tmp_path))
    plan.paths.logs.mkdir()
    plan.paths.rank_log(0).write_text("first start\n" * 300)
    plan.paths.rank_log(0, 1).write_text("second start\n")
    plan.paths.metrics.write_text('{"step": 1, "train/loss": 1, "throughput/samples_per_s": 1}\n')
    out = io.StringIO()
    following = LiveLog(plan, Console(file=out, width=100))
    following.refresh()
    with plan.paths.metrics.open("a") as file:
        file.write('{"step": 2, "train/loss": 2, "eval/loss": 5, "throughput/samples_per_s": 1}\n')
    following.refresh()
    with plan.paths.rank_log(0, 1).open("a") as file:
        file.write("Bus error")
    following.close()
    assert out.getvalue().splitlines() == [
        *["first start"] * 300, "--- rank0.attempt1.log ---", "second start",
        "step 2/3  loss 2.0000  held-out 5.0000  1 samples/s", "Bus error",
    ]  # fmt: skip
