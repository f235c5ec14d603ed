"""A tracker's process: kills, cut-backs, and trackers that fail or hang without disturbing the record or each other."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.report.tables import tracker_lines
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.paths import RunPaths
from launcher.trackers import mirror as trackers
from launcher.trackers.tracker import StepEntry, Tracker, entries_of, settings_of
from tests.helpers import make_plan, patience
from tests.infra.mirrored import (
    Growing,
    differences,
    in_tensorboard,
    kill_often,
    mirror,
    mirror_to_the_end,
    record_of,
    saved_plan,
    status_of,
)
from tests.infra.runs import wait_for

TENSORBOARD = "trackers=[tensorboard]"


def lines(*steps: int) -> list[str]:
    return [json.dumps(record_of(step)) for step in steps]


def test_entries_are_the_steps_that_are_new() -> None:
    plan = make_plan()
    assert [entry.step for entry in entries_of(plan, lines(1, 2, 3, 2, 3, 4), after=1)] == [2, 3, 4]
    (entry,) = entries_of(plan, ['{"step": 7, "a": null, "b": 2, "c": "text", "d": [1]}'], after=0)
    assert str(entry.numbers) == "{'a': nan, 'b': 2.0}"
    assert entry.texts == {"c": "text", "d": "[1]"}


def test_settings_are_flat_and_solved() -> None:
    settings = settings_of(make_plan("optimizer.betas=[0.8,0.9]"))
    assert settings["run.id"] == "abcd1234"
    assert settings["batch.global_size"] == 64
    assert settings["optimizer.betas"] == "[0.8, 0.9]"
    assert not [name for name in settings if name.startswith(("env", "notes"))]


@pytest.mark.slow
def test_what_is_cut_back_and_repeated_is_not_delivered_again(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    record = plan.paths.metrics
    first = mirror(plan, "tensorboard")
    record.write_text("\n".join(lines(*range(1, 10))) + "\n")
    wait_for(lambda: len(in_tensorboard(tmp_path / "tensorboard")) == 9, "nine steps")
    repeated = [json.dumps(record_of(step) | {"train/loss": -1}) for step in range(4, 13)]
    part = record.with_suffix(".part")
    part.write_text("\n".join([*lines(1, 2, 3), *repeated]) + "\n")
    part.replace(record)  # as a resume does
    wait_for(lambda: len(in_tensorboard(tmp_path / "tensorboard")) == 12, "twelve steps")
    first.communicate()
    stored = in_tensorboard(tmp_path / "tensorboard")
    assert [*stored] == [*range(1, 13)]
    assert [step for step in stored if stored[step]["train/loss"] == -1] == [10, 11, 12]
    assert mirror_to_the_end(plan, "tensorboard") == 0
    assert str(in_tensorboard(tmp_path / "tensorboard")) == str(stored)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.nightly)])
def test_each_step_is_in_tensorboard_once_however_often_it_is_killed(kills: int, tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    steps = kill_often(plan, "tensorboard", kills)
    assert steps > 50
    assert differences(in_tensorboard(tmp_path / "tensorboard"), steps, single=True) == []
    assert status_of(plan, "tensorboard")["delivered"] == steps


@pytest.mark.slow
def test_a_newer_attempt_owns_the_tracker(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    growing = Growing(plan)
    growing.add(3)
    old = mirror(plan, "tensorboard")
    wait_for(lambda: len(in_tensorboard(tmp_path / "tensorboard")) == 3, "three steps")
    Fence(plan.paths, Incarnation(0, 1)).claim()
    growing.add(3)
    assert old.wait(patience(30)) == 0
    old.communicate()
    assert len(in_tensorboard(tmp_path / "tensorboard")) == 3
    assert mirror_to_the_end(plan, "tensorboard", "0.1") == 0
    assert differences(in_tensorboard(tmp_path / "tensorboard"), 6, single=True) == []


@pytest.mark.slow
def test_a_tracker_that_is_not_listed_is_left_alone(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(1)
    assert mirror_to_the_end(plan, "mlflow") == 0
    assert status_of(plan, "mlflow") == {}


class Failing(Tracker):
    """Adapter that fails as its ``plan`` says, in the order of ``errors``."""

    errors: list[Exception | None]
    stored: list[int]

    def __init__(self, plan: object, status: dict[str, Any]) -> None: ...

    def open(self) -> dict[str, Any]:
        return {"delivered": max(self.stored, default=0), "url": "http://there"}

    def log(self, entries: Sequence[StepEntry]) -> None:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.stored += [entry.step for entry in entries]

    def finish(self, summary: dict[str, Any]) -> None: ...


class Again(Exception):
    """In place of the new interpreter: its arguments."""


def run_mirror(
    plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    ended: Callable[[], bool] = lambda: True,
    pauses: list[float] | None = None,
) -> tuple[int, int]:
    """Return the exit status, and how many interpreters it took."""
    monkeypatch.setattr(trackers, "_ended", ended)
    monkeypatch.setattr(trackers, "_pause", ([] if pauses is None else pauses).append)
    monkeypatch.setattr(trackers.signal, "alarm", lambda _: None)

    def execv(_: str, argv: list[str]) -> None:
        assert argv[:4] == [sys.executable, "-P", "-m", "launcher.trackers.mirror"]
        raise Again(argv[4:])

    monkeypatch.setattr(trackers.os, "execv", execv)
    arguments, count = [plan.run.dir, "0.0", "tensorboard"], 1
    while True:
        try:
            return trackers.main(*arguments), count
        except Again as again:
            (arguments,), count = again.args, count + 1


class Full:
    """Standard output or error on a full disk."""

    def write(self, _: str = "") -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[Failing]:
    monkeypatch.setattr(trackers, "tracker_class", lambda _: Failing)
    Failing.errors, Failing.stored = [], []
    return Failing


def test_one_failure_is_tried_again_without_a_word(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(3)
    failing.errors = [OSError("no answer")]
    assert run_mirror(plan, monkeypatch) == (0, 2)
    assert failing.stored == [1, 2, 3]
    assert status_of(plan, "tensorboard") == {"url": "http://there", "problem": None, "delivered": 3}


@pytest.mark.parametrize(("every_s", "kept"), [(0, 4), (60, 2)])
def test_the_position_in_the_output_is_kept_now_and_then_and_at_the_end(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: int, kept: int
) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    growing, log, positions = Growing(plan), plan.paths.rank_log(0, 0), set[str]()
    log.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(failing, "log_output", lambda *_: None)
    monkeypatch.setattr(trackers, "LOOK_EVERY_S", every_s)
    write = trackers.write_json
    monkeypatch.setattr(
        trackers, "write_json", lambda path, fields: (positions.add(str(fields.get("output"))), write(path, fields))
    )
    looks: list[int] = []

    def ended() -> bool:
        looks.append(1)
        growing.add(1)
        with log.open("a") as file:
            file.write("a line\n")
        return len(looks) > 3

    assert run_mirror(plan, monkeypatch, ended) == (0, 1)
    assert status_of(plan, "tensorboard")["output"] == [0, log.stat().st_size]
    assert len(positions - {"None"}) == kept


def test_a_full_disk_does_not_end_the_delivery(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the output nor the status can be written, and the tracker fails too, for the same reason at first."""
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(3)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(trackers.sys, name, Full())
    monkeypatch.setattr(trackers, "write_json", full)
    monkeypatch.setattr("launcher.rundir.files.os.write", full)
    failing.errors = [OSError(errno.ENOSPC, "No space left on device")] * 4
    assert run_mirror(plan, monkeypatch, ended=lambda: bool(failing.stored)) == (0, 5)
    assert failing.stored == [1, 2, 3]


def test_a_tracker_that_stays_away_is_reported_and_given_up_at_the_end(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(3)
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t")
    failing.errors = [OSError("https://me:hunter22@there with s3cr3t\n  does not answer")] * 2
    assert run_mirror(plan, monkeypatch) == (1, 2)
    problem = status_of(plan, "tensorboard")["problem"]
    rest = f"After the end of the run, `launch mirror {tmp_path}` sends the rest."
    assert problem == f"OSError: https://***@there with *** does not answer. {rest}"
    failing.errors = []
    assert run_mirror(plan, monkeypatch) == (0, 1)
    assert failing.stored == [1, 2, 3]
    assert status_of(plan, "tensorboard")["problem"] is None


def test_a_tracker_is_tried_again_as_long_as_the_run_goes_on(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(3)
    failing.errors = [RuntimeError("away")] * 7
    pauses: list[float] = []
    # the run ends after the tracker is back
    assert run_mirror(plan, monkeypatch, ended=lambda: bool(failing.stored), pauses=pauses) == (0, 8)
    assert failing.stored == [1, 2, 3]
    assert pauses == [0, 2, 4, 8, 16, 32, 64]
    assert status_of(plan, "tensorboard")["problem"] is None


def test_an_end_that_always_fails_is_given_up(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although each trial delivers something: the newest step again, as MLflow's does."""
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(3)

    def fail(*_: object) -> None:
        failing.stored.clear()
        raise OSError("no end")

    monkeypatch.setattr(failing, "finish", fail)
    assert run_mirror(plan, monkeypatch) == (1, 2)
    assert status_of(plan, "tensorboard")["problem"].startswith("OSError: no end. ")


def test_a_missing_package_is_not_tried_again(
    failing: type[Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    Growing(plan).add(1)
    failing.errors = [ModuleNotFoundError("No module named 'tensorboard'")]
    assert run_mirror(plan, monkeypatch, ended=lambda: False) == (1, 1)
    assert "pip install 'samebatch[tensorboard]'" in status_of(plan, "tensorboard")["problem"]


def test_what_the_commands_show_of_trackers(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, "trackers=[tensorboard,mlflow]")
    for tracker in ("wandb", "mlflow", "tensorboard"):  # one was left out when the run resumed
        plan.paths.tracker_status(tracker).write_text(json.dumps({"url": f"http://{tracker}", "problem": None}))
    expected = [("TensorBoard", "http://tensorboard", ""), ("MLflow", "http://mlflow", "")]
    assert [*tracker_lines(plan.paths)] == expected


def test_a_tracker_that_does_not_return_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = saved_plan(tmp_path, TENSORBOARD)
    status = trackers.Status(Fence(plan.paths, Incarnation()), "tensorboard")
    monkeypatch.setattr(trackers, "SILENT_AFTER_S", 0.01)
    with trackers.watched("tensorboard", status):
        wait_for(lambda: status.fields.get("problem"), "the report")
    assert status.fields["problem"] == "TensorBoard has not answered for 0.01 s; it is still being tried."


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "API request to endpoint /api failed with error code 401 != 200.",
            "The server refuses the login (/nowhere/mlruns, experiment launcher). ",
        ),
        ("HTTPConnectionPool(host='h', port=401): Max retries exceeded: server:403 (timed out)", "The server does not"),
        ("run-7f401: connection refused", "The server does not"),
        ('{"status":401}', "The server refuses the login"),
        ("401 Client Error: Unauthorized for url: http://h/api", "The server refuses the login"),
        ("Max retries exceeded with url: /api (Caused by NameResolutionError('no host'))", "There is no host of this"),
        (
            "HTTPConnectionPool: Max retries exceeded (NameResolutionError: Failed to resolve)",
            "There is no host of this",
        ),
        (
            "HTTPConnectionPool: Max retries exceeded (NewConnectionError: [Errno 111] Connection refused)",
            "The server does not",
        ),
    ],
)
def test_a_problem_says_what_is_wrong_and_what_to_check(text: str, cause: str) -> None:
    problem = trackers.problem_of("mlflow", RuntimeError(text), make_plan())
    assert problem.startswith(cause)
    assert "MLFLOW_TRACKING_PASSWORD" in problem
    shown = f"RuntimeError: {text.partition(' (Caused by')[0].removesuffix('.')}"
    assert problem.endswith(f" ({shown}).")
    assert trackers.problem_of("tensorboard", RuntimeError(text), make_plan()) == f"{shown}."


def test_output_of_rank_0_is_read_once_over_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.trackers.mirror.LOOK_EVERY_S", 0)
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()

    def write(text: str, attempt: int = 0) -> None:
        with paths.rank_log(0, attempt).open("a") as file:
            file.write(text)

    output = trackers.RankOutput(paths, None)
    assert output.lines(ended=False) == []
    write("one\n  10%\r  20%\r\ntw")
    assert output.lines(ended=False) == ["one", "  20%"]
    assert output.lines(ended=False) == []
    write("o\nthe last wo")
    assert output.lines(ended=False) == ["two"]
    paths.rank_log(1, 1).touch()  # an attempt without a rank 0
    write("again\nand", attempt=2)
    assert output.lines(ended=False) == ["the last wo"]
    output = trackers.RankOutput(paths, [*output.position])  # as the next process
    assert output.lines(ended=False) == ["again"]
    assert output.lines(ended=False) == []
    assert output.lines(ended=True) == ["and"]
    assert output.lines(ended=True) == []
    monkeypatch.setattr("launcher.trackers.mirror.MOST_OUTPUT", 4)
    write(" more\nx\ny", attempt=2)
    assert [output.lines(ended=True) for _ in range(4)] == [[" mor"], ["e", "x"], ["y"], []]
