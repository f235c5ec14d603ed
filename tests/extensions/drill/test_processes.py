"""The processes of a run: a drill kills all of them, and no process that only reads the run's files."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.extensions.drill import processes
from launcher.extensions.drill.backends import LocalBackend
from launcher.extensions.drill.processes import describe_survivors, kill_all, kill_rank, main, processes_of, workers_of
from launcher.launch import local
from launcher.process import AGENT_PID, RUN_ID
from launcher.rundir.fencing import Incarnation
from launcher.trackers.tracker_processes import TrackerProcesses
from tests.helpers import make_plan, patience
from tests.infra.runs import wait_for

MINE = f"mine-{os.getpid()}"  # the tests may run more than once at the same time
# an agent with two workers, one of which has a loader, and with a child of its own, such as the mirror
WORKER = f"{AGENT_PID}=$$ RANK={{rank}} sh -c '{{command}}' &"
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
        started("sleep", "1000", RANK="0", **{RUN_ID: "yours"}) as foreign,
        # a worker whose agent is gone, and the agent's id now belongs to another process
        started("sleep", "1000", RANK="2", **{RUN_ID: MINE, AGENT_PID: str(foreign.pid)}) as orphan,
    ):
        assert [each.pid for each in processes_of(MINE)] == [orphan.pid]
        with started("sh", str(tmp_path / "agent"), **{RUN_ID: MINE}) as agent:
            wait_for(lambda: len(processes_of(MINE)) == 6, "the agent, its workers and their children")
            assert workers_of(MINE).keys() == {0, 1}
            assert kill_rank(MINE, 1)
            wait_for(lambda: len(processes_of(MINE)) == 5, "rank 1 to die")
            assert not kill_rank(MINE, 1), "it has ended"
            assert kill_all(MINE) == (5, [])
            assert agent.wait(patience(10)) == -signal.SIGKILL
            assert orphan.wait(patience(10)) == -signal.SIGKILL
            assert main(MINE, "all") == 1, "nothing was left to kill"
            assert [one.poll() for one in (tail, foreign)] == [None] * 2


def test_a_worker_whose_agent_dies_meanwhile_does_not_lead_to_its_new_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's parent becomes PID 1 or the user's systemd; simulated by a process that is not of the run."""
    worker = f"{AGENT_PID}=$$ {RUN_ID}={MINE} TORCHELASTIC_RUN_ID={MINE} RANK=0 sleep 1000 & wait"
    with started("sh", "-c", worker) as agent, started("sleep", "1000") as init:
        wait_for(lambda: workers_of(MINE), "the worker")
        (worker_pid,) = [process.pid for process in workers_of(MINE).values()]
        parents = iter([agent.pid])
        monkeypatch.setattr(psutil.Process, "ppid", lambda _: next(parents, init.pid))
        assert [process.pid for process in processes_of(MINE)] == [worker_pid]
        monkeypatch.undo()
        assert kill_all(MINE)[1] == []
        assert init.poll() is None


def test_what_outlives_the_workers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent, mirror and `launch` of a drill are started with the run's id in their environment."""
    plan = make_plan("wandb.mode=offline", run_dir=str(tmp_path / "run"))
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, id=secrets.token_hex(4)))
    local.create(plan, "")
    sleeping = [sys.executable, "-c", "import time; time.sleep(1000)"]
    popen = subprocess.Popen
    sleepers: list[subprocess.Popen[Any]] = []

    def start(command: list[str], **options: Any) -> Any:
        options["cwd"] = tmp_path
        sleepers.append(popen([*sleeping, *command], **options))
        return sleepers[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    drill = LocalBackend()
    drill.plan = plan
    try:
        local._start_agent(plan, plan.paths.plan, Incarnation())
        TrackerProcesses(plan, Incarnation()).keep_running()
        drill.resume()
        pids = {process.pid for process in sleepers}
        wait_for(lambda: {process.pid for process in processes_of(plan.run.id)} == pids, "agent, mirror and `launch`")
        assert kill_all(plan.run.id) == (3, [])
        assert [process.wait(patience(10)) for process in sleepers] == [-signal.SIGKILL] * 3
    finally:
        for process in sleepers:
            process.kill()
            if process.stdin is not None:
                process.stdin.close()


def test_processes_that_survive_sigkill_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with started("sleep", "1000", RANK="0", **{RUN_ID: MINE}) as stuck:
        # nothing ends a process that is blocked in the kernel; simulated by signals that are not sent
        monkeypatch.setattr(psutil.Process, "kill", lambda _: None)
        began = time.monotonic()
        count, left = kill_all(MINE, within_s=0.2)
        assert (count, [each.pid for each in left]) == (1, [stuck.pid])
        assert time.monotonic() > began
        assert describe_survivors(left) == f"still there after SIGKILL: process {stuck.pid} (sleep 1000)"
        monkeypatch.setattr(processes, "kill_all", lambda *_: (count, left))
        assert main(MINE, "all") == 1
        assert str(stuck.pid) in capfd.readouterr().err
        monkeypatch.undo()
