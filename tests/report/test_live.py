"""Live display of a run, from growing files."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from launcher.cli import runs
from launcher.process import EXCEPTION_MARK
from launcher.report import live
from launcher.report.live import LiveDisplay, LogFollower, Output, console, rank_logs
from launcher.report.tables import plan_table
from launcher.rundir.files import Tail, write_text
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan

RATE = {"throughput/samples_per_s": 1}


class Shown:
    """A run in ``root``, its live display, and the text that the display has printed."""

    def __init__(self, root: Path, steps: int) -> None:
        self.plan = make_plan(f"train.steps={steps}", run_dir=str(root))
        self.plan.paths.logs.mkdir(exist_ok=True)
        self.out = io.StringIO()

    def open(self, *, whole: bool = False, width: int = 100, terminal: bool | None = None) -> LiveDisplay:
        console = Console(file=self.out, width=width, force_terminal=terminal)
        self.display = LiveDisplay(self.plan, console, whole=whole)
        return self.display

    def record(self, step: int, loss: float | None = 1, **fields: float) -> None:
        """Append a record, and have the display look at it."""
        with self.plan.paths.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "train/loss": loss, **RATE, **fields}) + "\n")
        self.display.refresh()

    def end(self) -> list[str]:
        self.display.close()
        return self.out.getvalue().splitlines()


def test_no_blanks_at_the_ends_of_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(plan_table(make_plan()), "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_record_that_takes_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text("1\n2\n3\n")
    assert tail.lines() == ["1", "2", "3"]
    write_text(path, "1\n2\n3\nand more\n")
    assert tail.lines() == ["1", "2", "3", "and more"]
    assert (tail.lines(), tail.replaced) == ([], 1)
    path.write_text("1\n")  # cut in place
    assert (tail.lines(), tail.replaced) == (["1"], 2)


def test_the_live_display_of_a_run_that_begins_again(tmp_path: Path) -> None:
    shown = Shown(tmp_path, 3)
    lines = [f'{{"step": {n}, "train/loss": {n}, "throughput/samples_per_s": 1}}\n' for n in (1, 2, 3)]
    display, metrics = shown.open(), shown.plan.paths.metrics
    metrics.write_text("".join(lines))
    display.refresh()
    shown.plan.paths.checkpoint(1).mkdir(parents=True)
    write_text(metrics, lines[0] + lines[1])  # the next step follows before the display looks again
    display.refresh()
    shown.record(3, 3)
    assert shown.end() == [
        "step 3/3  loss 3.0000  1 samples/s",
        "--- resumed after step 1 ---",
        "step 3/3  loss 3.0000  1 samples/s",
    ]


def test_a_run_that_is_resumed_shows_nothing_of_its_earlier_starts(tmp_path: Path) -> None:
    shown = Shown(tmp_path, 9)
    for attempt, text in enumerate(("the first start\n", "the second\n")):
        shown.plan.paths.rank_log(0, attempt).write_text(text)
    shown.plan.paths.metrics.write_text(json.dumps({"step": 8, "train/loss": 5.5, **RATE}) + "\n")
    shown.open().refresh()
    shown.plan.paths.rank_log(0, 2).write_text("Going on\n")
    shown.record(9, 5.5)
    assert shown.end() == ["--- rank0.attempt2.log ---", "Going on", "step 9/9  loss 5.5000  1 samples/s"]


def test_the_output_after_a_restart_is_shown_though_the_start_before_ended_with_an_exception(tmp_path: Path) -> None:
    """Both logs are read at the same moment."""
    shown = Shown(tmp_path, 9)
    display = shown.open()
    shown.plan.paths.rank_log(0).write_text(f"first\n[rank0]: {EXCEPTION_MARK}\n[rank0]: Traceback\n")
    shown.plan.paths.rank_log(0, 1).write_text("second\n")
    display.refresh()
    assert shown.end() == ["first", "--- rank0.attempt1.log ---", "second"]


def test_the_live_display_follows_the_files(tmp_path: Path) -> None:
    shown = Shown(tmp_path, 9)
    display = shown.open()
    display.refresh()  # nothing is there yet
    log, metrics = shown.plan.paths.rank_log(0), shown.plan.paths.metrics
    log.write_text("first [not markup]\nhalf a")
    metrics.write_text('{"step": 1, "train/loss": 5.5, "throughput/samples_per_s": 1234.5}\n{"step": 2, "tra')
    display.refresh()
    with log.open("a") as file:
        file.write(f" line\n[rank0]: {EXCEPTION_MARK}\n[rank0]: Traceback that is not its own\n")
    (tmp_path / "wandb.json").write_text('{"problem": "no server"}')
    with metrics.open("a") as file:
        file.write('in/loss": 5.25, "eval/loss": 5.0, "throughput/samples_per_s": 1000}\n')
    shown.record(9, None, **{"throughput/samples_per_s": 1000})  # a last window without items
    display.refresh()
    assert shown.end() == [
        "first [not markup]",
        "step 1/9  loss 5.5000  1,234 samples/s",
        "half a line",
        "step 2/9  loss 5.2500  held-out 5.0000  1,000 samples/s",  # each evaluation has its line
        "step 9/9  loss -  1,000 samples/s",
        "W&B: no server",
    ]


def test_a_terminal_keeps_a_line_for_each_evaluation(tmp_path: Path) -> None:
    shown = Shown(tmp_path, 9)
    shown.open(width=80, terminal=True)
    for step in range(1, 6):
        shown.record(step, **{"time/total_s": step}, **({"eval/loss": step / 8} if step % 2 == 0 else {}))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "\n".join(shown.end()))
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    for step, held_out in ((2, "0.2500"), (4, "0.5000")):
        assert sum(line.startswith(f"step {step}/9  loss 1.0000  held-out {held_out}") for line in lines) >= 1
    assert [line for line in lines if line][-1].startswith("step 5/9  loss 1.0000  1 samples/s"), lines[-3:]


def test_plain_lines_say_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PLAIN_LINE_EVERY_S", 0.0)
    shown = Shown(tmp_path, 300)
    shown.open(width=200)
    for step in (1, 2, 6, 7, 300):  # two seconds a step, after a first one of ten
        shown.record(step, **{"time/total_s": 8 + 2 * step})
    assert shown.end() == [
        "step 1/300  loss 1.0000  1 samples/s",
        "step 2/300  loss 1.0000  1 samples/s  9 min 56 s left",
        "The 300 steps take about 10 min 8 s; 9 min 48 s left.",
        "step 6/300  loss 1.0000  1 samples/s  9 min 48 s left",
        "step 7/300  loss 1.0000  1 samples/s  9 min 46 s left",
        "step 300/300  loss 1.0000  1 samples/s",
    ]


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
    shown = Shown(tmp_path, 3)
    first, second = (shown.plan.paths.rank_log(0, attempt) for attempt in (0, 1))
    first.write_text("first start\n" * 300)
    second.write_text("second start\n")
    shown.plan.paths.metrics.write_text(json.dumps({"step": 1, "train/loss": 1, **RATE}) + "\n")
    shown.open(whole=True).refresh()
    shown.record(2, 2, **{"eval/loss": 5})
    with second.open("a") as file:
        file.write("Bus error")
    assert shown.end() == [
        *["first start"] * 300, "--- rank0.attempt1.log ---", "second start",
        "step 2/3  loss 2.0000  held-out 5.0000  1 samples/s", "Bus error",
    ]  # fmt: skip


def test_a_stalled_reader_holds_nothing_and_loses_only_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_WAITING", 2**20)
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        output = Output(writer, trim=True)
        output.write("first  \n")
        output.flush()
        output.unblock()
        for number in range(400):
            output.write(f"{number:<9999}.\n")  # 4 MB: more than the pipe and the buffer hold
        assert not output.finish(patient=False)
        text: list[str] = []
        thread = threading.Thread(target=lambda: text.extend(reader))
        thread.start()
        assert output.finish(patient=True)
        output.write("direct\n")
        writer.close()
        thread.join()
    assert [line[:2] for line in text[:3]] == ["fi", "0 ", "1 "], "in their order"
    assert len(text) > 100
    assert text[-2].endswith("lines are left out: the reader was too slow ---\n")
    assert text[-1] == "direct\n"


def test_a_reader_that_is_gone_is_an_error_as_ever() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as writer:
        output = Output(writer)
        output.unblock()
        output.write("nobody reads this\n")
        assert output.finish(patient=True)
        try:
            output.write("nor this\n")
            output.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
        else:
            raise AssertionError("no error")


def test_many_short_texts_are_all_delivered(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as writer:
        output = Output(writer)
        output.unblock()
        for number in range(20_000):
            output.write(f"{number}\n")
        assert output.finish(patient=True)
    assert (tmp_path / "out").read_text().splitlines() == [str(number) for number in range(20_000)]
