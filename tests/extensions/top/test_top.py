"""Live view: its keys and its layout, by Textual's own driver without a terminal; and on real runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from launcher.cli import run, runs
from launcher.extensions.top.top import Confirmation, Log, Top
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.paths import RunPaths
from launcher.runs import control
from launcher.runs.status import RunState
from tests.extensions.top.test_run_progress import running
from tests.helpers import patience
from tests.infra.made_runs import make_run
from tests.infra.runs import start, wait_for_steps
from tests.infra.terminal import on_terminal

Steps = Callable[[Top, "Pilot[None]"], Awaitable[None]]


def drive(runs: Path, steps: Steps, size: tuple[int, int] = (80, 24)) -> None:
    """Open the view, wait for its first look, and take ``steps``."""

    async def body() -> None:
        app = Top(runs)
        async with app.run_test(size=size) as pilot:
            await until(lambda: app.query_one(DataTable).row_count > 0, pilot)
            await steps(app, pilot)

    asyncio.run(body())


async def until(condition: Callable[[], bool], pilot: Pilot[None], seconds: float = 60) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end
        await pilot.pause(0.05)


def column(app: Top, title: str) -> list[str]:
    table = app.query_one(DataTable)
    key = next(key for key, each in table.columns.items() if str(each.label) == title)
    return [str(cell) for cell in table.get_column(key)]


def text_of(app: Top, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits_into_the_terminal(tmp_path: Path, width: int) -> None:
    make_run(tmp_path, "a" * 70)

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        del pilot
        table = app.query_one(DataTable)
        assert table.virtual_size.width <= width
        titles = [str(each.label) for each in table.columns.values()]
        assert {"run", "state", "step", "loss"} <= set(titles)
        assert ("left" in titles) == (width >= 80)
        assert ("samples/s" in titles) == (width > 100)
        assert ("last event" in titles) == (width == 200)

    drive(tmp_path, steps, (width, 24))


def test_the_details_are_those_of_the_run_under_the_cursor(tmp_path: Path) -> None:
    first = running(tmp_path, "first", recorded=10)
    history.note_event(first, "failed", error="[/pytorch/x.cpp:1] no [red] markup")
    make_run(tmp_path, "second", verdict="failed")

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        assert column(app, "run") == ["first", "second"]
        assert column(app, "state") == ["running", "failed"]
        assert "first" in text_of(app, "details")
        assert column(app, "last event")[0].endswith("[/pytorch/x.cpp:1] no [red] markup")
        await pilot.press("down")
        assert "second" in text_of(app, "details")
        assert "rank 1: out of luck" in text_of(app, "details")
        running(tmp_path, "third")
        await until(lambda: app.query_one(DataTable).row_count == 3, pilot)
        assert "second" in text_of(app, "details"), "the cursor stays on its run"

    drive(tmp_path, steps, (200, 24))


def test_the_bell_rings_at_the_end_of_a_run_that_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[str] = []
    monkeypatch.setattr(Top, "bell", lambda _: rings.append("ring"))
    quiet, loud = running(tmp_path, "quiet"), running(tmp_path, "loud")
    write_json(loud.plan, json.loads(loud.plan.read_text()) | {"notify": ["bell"]})

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        for ended, expected in ((quiet, []), (loud, ["ring"])):
            write_json(ended.summary, {"verdict": "failed"})
            write_json(ended.newest_incarnation, {"incarnation": "0.0", "nodes": ["node0"], "ranks": 2})
            history.amend_submission(ended, ended=True)
            await until(lambda name=ended.root.name: state_of(app, name) == "failed", pilot)
            assert rings == expected
        await pilot.pause(0.1)
        assert rings == ["ring"], "once"

    def state_of(app: Top, name: str) -> str:
        return dict(zip(column(app, "run"), column(app, "state"), strict=True))[name]

    drive(tmp_path, steps)


def test_the_log_of_a_rank_is_followed(tmp_path: Path) -> None:
    paths = running(tmp_path, "talks")
    paths.logs.mkdir()
    paths.rank_log(0).write_text("from rank 0 [not markup]\n")
    paths.rank_log(1).write_text("from rank 1\n")

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        def shown() -> str:
            return "\n".join(line.text for line in app.screen.query_one(RichLog).lines)

        await pilot.press("l")
        await until(lambda: isinstance(app.screen, Log) and "from rank 0 [not markup]" in shown(), pilot)
        with paths.rank_log(0).open("a") as log:
            log.write("one more\n")
        await until(lambda: "one more" in shown(), pilot)
        await pilot.press("1")
        await until(lambda: "from rank 1" in shown(), pilot)
        assert "one more" not in shown()
        await pilot.press("7")
        await until(lambda: "rank 7 has no log yet" in shown(), pilot)
        await pilot.press("escape")
        assert not isinstance(app.screen, Log)

    drive(tmp_path, steps)


def test_what_makes_no_sense_is_not_asked(tmp_path: Path) -> None:
    make_run(tmp_path, "over", verdict="stopped")

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("c")
        assert not isinstance(app.screen, Confirmation)
        await pilot.press("r")
        assert isinstance(app.screen, Confirmation)
        await pilot.press("n")
        assert not isinstance(app.screen, Confirmation)

    drive(tmp_path, steps)


def test_it_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top"]) == 2
    assert "needs a terminal" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_cancelled_and_resumed(project: Path) -> None:
    job = start(project, "train.steps=100000", "checkpoint.every=10")
    wait_for_steps(project / "runs/own", 3)

    def state() -> str:
        return json.loads((project / "runs/own/summary.json").read_text())["verdict"]

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("c", "y")
        await until(lambda: column(app, "state") == ["cancelled"], pilot)
        assert state() == "stopped"
        job.communicate()
        await pilot.press("r", "y")
        await until(lambda: column(app, "state") == ["running"], pilot)
        await pilot.press("c", "y")
        await until(lambda: column(app, "state") == ["cancelled"], pilot)

    drive(project / "runs", steps)
    events = [json.loads(line)["event"] for line in RunPaths(project / "runs/own").events.read_text().splitlines()]
    assert events.count("cancelled") == 2


@pytest.mark.slow
def test_in_a_real_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "seen")
    status, shown = on_terminal("top", cwd=tmp_path, env={"TERM": "xterm"}, until="seen", then=b"q")
    assert status == 0, shown


@pytest.mark.parametrize("last", [RunState.done, RunState.failed, RunState.stopped])
def test_a_run_is_watched_until_it_is_over(
    tmp_path: Path, last: RunState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while Slurm does not answer."""
    paths = make_run(tmp_path / "runs", "watched")
    was = control.status_of(paths)
    states = [RunState.pending, RunState.running, RunState.unknown, RunState.requeued, last]
    answers = [dataclasses.replace(was, state=state, failure=None) for state in states]
    monkeypatch.setattr(control, "status_of", lambda _: answers.pop(0))
    monkeypatch.setattr(runs, "_WATCH_S", 0)
    status = run(["status", "watched", "--watch", "--dir", str(tmp_path / "runs")])
    assert status == {RunState.done: 0, RunState.failed: 1, RunState.stopped: 75}[last]
    assert not answers
    assert f"Run watched: {last.value}" in capsys.readouterr().out
