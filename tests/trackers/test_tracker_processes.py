"""Processes of the trackers: each gets its own secrets only, is started again when killed, and is not waited for."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.plan.run_plan import RunPlan
from launcher.report.tables import tracker_lines
from launcher.rundir.fencing import Incarnation
from launcher.trackers import tracker_processes
from launcher.trackers.tracker_processes import TrackerProcesses, wait_after_stop
from tests.helpers import make_plan
from tests.infra.runs import wait_for

ALL = ("trackers=[wandb,tensorboard,mlflow]",)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the started processes, which only wait for the end of their input."""
    popen, commands = subprocess.Popen, list[list[str]]()

    def start(command: list[str], **options: Any) -> Any:
        process = popen([sys.executable, "-c", "import sys; sys.stdin.read()", *command[3:]], **options)
        commands.append(command)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return commands


def plan_in(run_dir: Path, *overrides: str) -> RunPlan:
    plan = make_plan(*overrides, run_dir=str(run_dir))
    plan.paths.logs.mkdir(parents=True)
    return plan


def of_run(plan: RunPlan) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it ends
            command = child.cmdline()
            if plan.run.dir in command:
                found[command[-1]] = child
    return found


def test_each_has_a_process_with_the_environment_of_the_job(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    plan = plan_in(tmp_path, *ALL)
    trackers = TrackerProcesses(plan, Incarnation(1, 2))
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")  # the workers' environment replaces this one later
    trackers.start()
    found = of_run(plan)
    assert [*found] == ["wandb", "tensorboard", "mlflow"]
    assert started[1][3:] == ["launcher.trackers.mirror", plan.run.dir, "1.2", "tensorboard"]
    assert all("MLFLOW_TRACKING_PASSWORD" in process.environ() for process in found.values())
    assert trackers.finish(30) == {*found}
    assert of_run(plan) == {}
    assert len(started) == 3


def test_one_that_is_killed_starts_again_until_the_end(tmp_path: Path, started: list[list[str]]) -> None:
    plan = plan_in(tmp_path, "trackers=[tensorboard]")
    trackers = TrackerProcesses(plan, Incarnation())
    trackers.start()
    first = of_run(plan)["tensorboard"]
    first.kill()
    wait_for(lambda: len(started) == 2, "another one")
    os.kill(of_run(plan)["tensorboard"].pid, signal.SIGSTOP)  # it hangs
    assert trackers.finish(0.1) == set()
    problem = json.loads(plan.paths.tracker_status("tensorboard").read_text())["problem"]
    assert "TensorBoard had not taken everything 0.1 s after the end" in problem
    assert f"`launch mirror {tmp_path}` sends the rest" in problem
    assert len(started) == 2


def test_those_of_a_script_start_when_its_engine_has_a_plan(tmp_path: Path, started: list[list[str]]) -> None:
    plan = plan_in(tmp_path, "trackers=[tensorboard]")
    fields = json.loads(plan.to_json())
    script = {name: fields[name] for name in ("format", "run", "cluster", "env", "command", "notify", "added")}
    plan.paths.plan.write_text(json.dumps(script))
    from launcher.plan.launch_plan import LaunchPlan

    trackers = TrackerProcesses(LaunchPlan.load(plan.paths.plan), Incarnation())
    trackers.start()
    assert started == []
    plan.paths.loop_plan.write_text(plan.to_json())
    trackers.finish(30)
    assert [command[-1] for command in started] == ["tensorboard"]


def test_one_without_a_log_starts_nevertheless(tmp_path: Path, started: list[list[str]]) -> None:
    plan = make_plan("trackers=[tensorboard]", run_dir=str(tmp_path))  # logs/ does not exist
    trackers = TrackerProcesses(plan, Incarnation())
    trackers.start()
    trackers.finish(30)
    assert len(started) == 1, "its output is lost; its store may be on another disk"


@pytest.mark.usefixtures("started")
def test_no_failure_of_the_system_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in(tmp_path, "trackers=[tensorboard,mlflow]")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracker_processes, "write_json", full)
    monkeypatch.setattr("builtins.print", full)
    monkeypatch.setattr(os, "write", full)
    hanging = TrackerProcesses(plan, Incarnation())
    hanging.start()
    for process in of_run(plan).values():
        process.suspend()
    hanging.finish(0.1)
    monkeypatch.setattr(subprocess, "Popen", full)
    without = TrackerProcesses(plan, Incarnation())
    without.start()
    without.finish(1)
    assert of_run(plan) == {}


def test_a_stop_names_the_trackers_that_are_waited_for(tmp_path: Path) -> None:
    assert wait_after_stop(make_plan("trackers=[]")) == ""
    plan = plan_in(tmp_path, "trackers=[wandb,tensorboard]")
    assert wait_after_stop(plan) == " Then it waits up to 5 s for W&B, TensorBoard to take the rest."


def test_one_that_is_killed_again_and_again_is_given_up(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(tracker_processes.time, "monotonic", lambda: now[0])
    plan = plan_in(tmp_path, "trackers=[tensorboard]")
    trackers = TrackerProcesses(plan, Incarnation())

    def kill_and_wait(seconds: float) -> int:
        for process in of_run(plan).values():
            process.kill()
            wait_for(lambda p=process: p.status() == psutil.STATUS_ZOMBIE, "its death")
        trackers.keep_running()
        now[0] += seconds
        trackers.keep_running()
        return len(started)

    trackers.keep_running()
    assert [kill_and_wait(0.9), kill_and_wait(0.2)] == [1, 2]
    assert [kill_and_wait(9), kill_and_wait(2)] == [2, 3]
    now[0] += 301  # it works meanwhile
    assert [kill_and_wait(1.1), kill_and_wait(11), kill_and_wait(61)] == [4, 5, 6]
    assert kill_and_wait(1000) == 6
    trackers.keep_running(at_once=True)
    assert len(started) == 6
    plan.save()
    (line,) = tracker_lines(plan.paths)
    assert "The process of TensorBoard was killed 4 times in succession, last by signal 9" in line[2]
