"""Which processes are a run's: a drill kills those, all of them, and nobody who only looks at its files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.drill import processes
from launcher.drill.processes import in_words, kill_all, main, processes_of
from tests.infra.runs import wait_for


@contextmanager
def started(*words: str, program: str | None = None, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with ``words`` as its command line, whatever it is."""
    process = subprocess.Popen(words, executable=program, env=os.environ | environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "log").write_text("step 1\n")
    # what a shell takes for its script where Python takes the word for a module
    for name in ("launcher.launch.agent", "launcher", "launcher.train.checkpoint.diff", "launch"):
        (tmp_path / name).write_text("sleep 1000 &\nwait\n")
    return tmp_path


def test_a_kill_reaches_the_run_and_nobody_who_reads_its_log(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    with (
        started("tail", "-f", str(run / "log")) as tail,
        started("python", "-m", "launcher", "logs", str(run), program="/bin/sh") as watching,
        started("python", "-m", "launcher.train.checkpoint.diff", str(run), program="/bin/sh") as comparing,
        started("python", "launch", "cancel", str(run), program="/bin/sh") as cancelling,
    ):
        bystanders = [tail, watching, comparing, cancelling]
        assert processes_of(str(run), "mine") == []
        assert main(str(run), "mine", "all") == 1, "there was nobody"
        with (
            started("python", "-m", "launcher.launch.agent", str(run), program="/bin/sh") as agent,
            started("python", "-m", "launcher", "resume", "--quiet", str(run), program="/bin/sh") as module,
            started("python", "launch", "resume", str(run), program="/bin/sh") as script,
            started("python", "-m", "launcher.launch.agent", f"{run}er", program="/bin/sh") as another,
            started("sleep", "1000", TORCHELASTIC_RUN_ID="mine", RANK="0") as worker,
            started("sleep", "1000", TORCHELASTIC_RUN_ID="yours", RANK="0") as foreign,
        ):
            ours = [agent, module, script, worker]
            children = [os.getpid()]

            def all_have_children() -> bool:
                found = processes_of(str(run), "mine")
                children[:] = [each.pid for each in found if each.parent in {one.pid for one in ours}]
                return len(children) == 3

            wait_for(all_have_children, "the children of agent and launch")
            count, left = kill_all(str(run), "mine")
            assert (count, left) == (7, [])
            assert [one.wait(10) for one in ours] == [-signal.SIGKILL] * 4
            assert not [pid for pid in children if Path(f"/proc/{pid}/cwd").exists()], "theirs died with them"
            assert [one.poll() for one in (*bystanders, another, foreign)] == [None] * 6


def test_what_sigkill_does_not_end_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    with started("sleep", "1000", TORCHELASTIC_RUN_ID="mine", RANK="0") as stuck:
        # nothing ends a process in the kernel's hands: here no signal comes through at all
        monkeypatch.setattr(processes.os, "kill", lambda *_: None)
        monkeypatch.setattr(processes, "_DIES_WITHIN_S", 0.2)
        began = time.monotonic()
        count, left = kill_all(str(run), "mine", within_s=0.2)
        assert (count, [each.pid for each in left]) == (1, [stuck.pid])
        assert time.monotonic() > began
        assert in_words(left) == f"still there after SIGKILL: process {stuck.pid} (sleep 1000)"
        monkeypatch.setattr(processes, "kill_all", lambda *_: (count, left))
        assert main(str(run), "mine", "all") == 1
        assert str(stuck.pid) in capfd.readouterr().err
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("/usr/bin/srun --unbuffered --output /run/slurm/%j.out --kill-on-bad-exit=1 /bin/sh", True),
        ("/venv/bin/python -P -u -m submitit.core._submit /run/slurm", True),
        ("/venv/bin/python -P -m launcher.report.trackers /run 3.0", True),
        ("/venv/bin/python -P -m launcher.drill.processes /run id all", False),
        ("/venv/bin/python /venv/bin/launch logs /run -f", False),
        ("/venv/bin/python -m pytest /run", False),
        ("python", False),
        ("vim /run/launch.log", False),
        ("", False),
    ],
)
def test_what_a_run_consists_of(words: str, runs: bool) -> None:
    assert processes.runs_jobs(words.split(" ")) is runs
