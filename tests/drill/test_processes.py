"""The processes of a run: a drill kills all of them, and no process that only reads the run's files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launcher.drill import processes
from launcher.drill.processes import describe_survivors, kill_all, kill_rank, main, processes_of, workers_of
from launcher.process import AGENT_PID
from tests.infra.runs import wait_for

# an agent with two workers, one of which has a loader, and with a child of its own, such as the mirror
WORKER = f"{AGENT_PID}=$$ TORCHELASTIC_RUN_ID=mine RANK={{rank}} sh -c '{{command}}' &"
LOADER = "sleep 1000 & wait"
AGENT = f"{WORKER.format(rank=0, command=LOADER)} {WORKER.format(rank=1, command='exec sleep 1000')} sleep 1000 & wait"


@contextmanager
def started(*words: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env=os.environ | environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_kill_reaches_all_processes_of_the_run_and_no_reader_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 1\n")
    (tmp_path / "agent").write_text(AGENT)
    with (
        started("tail", "-f", str(tmp_path / "log")) as tail,
        started("sleep", "1000", TORCHELASTIC_RUN_ID="yours", RANK="0") as foreign,
        # a worker whose agent is gone, and the agent's id now belongs to another process
        started("sleep", "1000", TORCHELASTIC_RUN_ID="mine", RANK="2", **{AGENT_PID: str(foreign.pid)}) as orphan,
    ):
        assert [each.pid for each in processes_of("mine")] == [orphan.pid]
        with started("sh", "-c", f"sh {tmp_path / 'agent'} & wait") as launch:
            wait_for(lambda: len(processes_of("mine")) == 6, "the agent, its workers and their children")
            assert len(processes_of("mine", launch.pid)) == 7
            assert workers_of("mine").keys() == {0, 1}
            assert kill_rank("mine", 1)
            wait_for(lambda: len(processes_of("mine")) == 5, "rank 1 to die")
            assert not kill_rank("mine", 1), "it has ended"
            count, left = kill_all("mine", launch.pid)
            assert (count, left) == (6, [])
            assert launch.wait(10) == -signal.SIGKILL
            assert orphan.wait(10) == -signal.SIGKILL
            assert main("mine", "all") == 1, "nothing was left to kill"
            assert [one.poll() for one in (tail, foreign)] == [None] * 2


def test_processes_that_survive_sigkill_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with started("sleep", "1000", TORCHELASTIC_RUN_ID="mine", RANK="0") as stuck:
        # nothing ends a process that is blocked in the kernel; simulated by signals that are not sent
        monkeypatch.setattr(psutil.Process, "kill", lambda _: None)
        began = time.monotonic()
        count, left = kill_all("mine", within_s=0.2)
        assert (count, [each.pid for each in left]) == (1, [stuck.pid])
        assert time.monotonic() > began
        assert describe_survivors(left) == f"still there after SIGKILL: process {stuck.pid} (sleep 1000)"
        monkeypatch.setattr(processes, "kill_all", lambda *_: (count, left))
        assert main("mine", "all") == 1
        assert str(stuck.pid) in capfd.readouterr().err
        monkeypatch.undo()
