"""The watch itself: whatever fails or changes while it looks, the rank that hangs is ended, and no other one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from launcher import heartbeat
from launcher.heartbeat import Heartbeat, Phase, Wait
from launcher.launch import flight_recorder, watchdog
from launcher.launch.flight_recorder import GroupTrace
from launcher.launch.hang_verdict import Hang, Stacks
from launcher.launch.rendezvous import ALONE, AgentStore
from launcher.launch.watchdog import HangWatch
from launcher.rundir import history
from tests.helpers import make_plan, patience

STUCK = Stacks('Thread 0x1 (most recent call first):\n  File "/me/my.py", line 7 in loss')
Ask = Mapping[int, tuple[int, Path]]


class Watched:
    """A watch over one process as its ranks 0 and 1, of which rank 1 is behind; each look is as the time limit long."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        run.mkdir()
        self.run, self.process = run, process
        self.watch = HangWatch(make_plan(run_dir=str(run)), ALONE, 10.0, lambda: None)
        self.watch._pids = lambda start: {0: 2**22 + 1, 1: process.pid}  # noqa: ARG005
        self.begin()

    def begin(self) -> None:
        self.ways = self.watch.begin({0: (0, Path("log0")), 1: (1, Path("log1"))})
        for rank in (0, 1):
            self.beat(rank, 2 - rank)

    def beat(self, local_rank: int, number: int) -> None:
        beats = Heartbeat()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(heartbeat.PROGRESS, self.ways[local_rank])
            beats.open()
        beats._beats = number
        beats.begin_window(1, 1)
        beats.beat(Phase.computing, number)

    def look(self) -> None:
        attempt = self.watch._current
        assert attempt is not None
        self.watch._check(attempt, 10.0)

    @property
    def killed(self) -> bool:
        if self.watch.hang_of(self.process.pid) is None:
            return False
        return self.process.wait(patience(60)) == -9


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    process = subprocess.Popen(["sleep", "1000"])
    yield Watched(tmp_path / "run", process)
    process.kill()
    process.wait()


def answering(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] = lambda: None) -> list[Ask]:
    """Stacks take their time; ``meanwhile`` things go on. Returns who was asked."""
    asked: list[Ask] = []

    def ask_all(workers: Ask) -> dict[int, Stacks]:
        asked.append(workers)
        meanwhile()
        return dict.fromkeys(workers, STUCK)

    monkeypatch.setattr(watchdog, "request_all_stacks", ask_all)
    return asked


def test_the_one_behind_is_asked_and_ended(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch)
    watched.look()
    assert asked == [], "it has just come there"
    watched.look()
    assert asked == [{1: (watched.process.pid, Path("log1"))}]
    assert watched.killed
    assert watched.watch.last is not None
    assert watched.watch.last.rank == 1
    (event,) = history.read_events(watched.watch._plan.paths)
    assert (event["event"], event["rank"], event["phase"]) == ("hang", 1, "computing")


@pytest.mark.parametrize("moves", [False, True])
def test_on_gpus_all_are_compared(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moves: bool
) -> None:
    """Rank 1 is behind, and rank 0 has not queued what it waits for; unless it moves, it hangs."""
    asked = answering(monkeypatch, lambda: watched.beat(0, 5) if moves else None)
    groups = {0: [GroupTrace("0", (), 4, 4)], 1: [GroupTrace("0", (), 5, 4, "all_reduce")]}
    monkeypatch.setenv(flight_recorder.PIPE, str(tmp_path / "emptied" / "rank"))
    monkeypatch.setattr(flight_recorder, "request_traces", lambda ranks: {rank: groups[rank] for rank in ranks})
    watched.begin()
    assert (tmp_path / "emptied").is_dir(), "torch aborts a worker whose pipe has no directory"
    watched.look()
    watched.look()
    assert asked[0].keys() == {0, 1}
    if moves:
        assert watched.watch.last is None
        return
    assert watched.watch.last is not None
    assert watched.watch.last.rank == 0
    assert watched.watch.last.text.endswith("group 0, collective 5: rank 1 in all_reduce; not queued by rank 0")


def test_stacks_are_only_requested_of_those_behind_and_of_those_that_they_wait_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch)
    groups = {0: [GroupTrace("0", (), 5, 4, "all_reduce")], 1: [GroupTrace("0", (), 4, 4)]}
    monkeypatch.setenv(flight_recorder.PIPE, "/tmp/rank")
    monkeypatch.setattr(flight_recorder, "request_traces", lambda ranks: {rank: groups[rank] for rank in ranks})
    watched.look()
    watched.look()
    assert asked == [{1: (watched.process.pid, Path("log1"))}]
    assert watched.killed


class Full:
    """A standard error on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, f"No space left on device: {text[:0]}")

    def flush(self) -> None: ...


def test_it_is_ended_although_nothing_can_be_said_of_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    (watched.run / "events.jsonl").mkdir()  # which cannot be appended to
    monkeypatch.setattr(sys, "stderr", Full())
    watched.look()
    watched.look()
    assert watched.killed


def test_a_look_that_fails_is_not_the_last_one(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def look(attempt: object, passed: float) -> None:  # noqa: ARG001
        looks.append(passed)
        if len(looks) == 3:
            watched.watch._over.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watched.watch, "_check", look)
    watched.watch._every_s = 0.01
    with watched.watch as watch:
        watch.join(patience(60))
    assert len(looks) == 3
    assert "Too many open files" in capsys.readouterr().err


def test_one_that_gets_on_while_it_is_asked_is_left_alone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, lambda: watched.beat(1, 5))
    watched.look()
    watched.look()
    assert len(asked) == 1
    assert watched.watch.last is None
    watched.beat(0, 6)  # and rank 1 stays: now it does hang
    answering(monkeypatch)
    watched.look()
    watched.look()
    assert watched.killed


@pytest.mark.parametrize("what", ["new workers", "asked to stop", "over"])
def test_no_verdict_on_what_is_no_more(what: str, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    happens = {
        "new workers": watched.begin,  # their ranks have come to just where the old ones were
        "asked to stop": lambda: setattr(watched.watch, "_stop_signal", lambda: 15),
        "over": watched.watch._over.set,
    }
    asked = answering(monkeypatch, happens[what])
    watched.look()
    watched.look()
    assert len(asked) == 1
    assert watched.watch.last is None
    assert watched.process.poll() is None
    assert history.read_events(watched.watch._plan.paths) == []


def test_another_node_answers_each_question_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says of a rank that moved since then that it did."""
    asked = answering(monkeypatch)
    watched.watch._node, store = 1, AgentStore(ALONE, 1)
    monkeypatch.setattr(watched.watch, "_store", store)

    def answers(question: int) -> dict[str, dict[str, object]]:
        (text,) = store.read([f"0/response {question}/1"]).values()
        return json.loads(text)

    store.post("0/request", json.dumps([1, False, [[1, 2], [7, 3]]]))
    watched.look()
    watched.look()
    assert len(asked) == 1, "although it has read the question twice"
    stuck = dataclasses.replace(STUCK, wait=Wait.collective)
    assert answers(1) == {"1": dataclasses.asdict(stuck)}, "rank 7 is elsewhere"
    watched.beat(1, 8)
    store.post("0/request", json.dumps([2, False, [[1, 2]]]))
    watched.look()
    assert answers(2)["1"]["moved"] is True
    verdict = Hang(rank=1, victim=1, node=1, host="b", step=1, phase="computing", text="hangs", stack="")
    store.post("0/verdict", json.dumps(dataclasses.asdict(verdict)))
    watched.look()
    assert watched.killed
