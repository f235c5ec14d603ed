"""Contexts that change the process for a while."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from launcher.heartbeat import PROGRESS
from launcher.launch.slurm.client import command_environment
from launcher.process import (
    AGENT_PID,
    RUN_DIR,
    RUN_ID,
    STOP_SIGNALS,
    StopRequest,
    deferred_interrupts,
    environment,
    inherited_environment,
    raise_open_files,
    shared_interval,
    signal_handler,
)
from launcher.rundir.fencing import INCARNATION


def test_what_describes_one_process_of_an_outer_job_is_not_inherited() -> None:
    of_one = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "PMIX_RANK")
    of_one += ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "PALS_LOCAL_RANKID")
    of_one += (AGENT_PID, RUN_DIR, RUN_ID, INCARNATION, PROGRESS)
    of_all = ("FI_PROVIDER", "UCX_TLS", "HF_TOKEN", "SLURM_JOB_ID", "MY_RANK", "PMIX_MCA_psec", "PYTHONPATH")
    shell = dict.fromkeys((*of_one, *of_all, "SLURM_CONF", "SBATCH_TIMELIMIT"), "x")
    assert set(inherited_environment(shell)) == {*of_all, "SLURM_CONF", "SBATCH_TIMELIMIT"}
    with environment(shell):  # what sbatch passes to a job
        assert set(inherited_environment(command_environment())) == {*of_all, "SLURM_CONF"} - {"SLURM_JOB_ID"}


def test_environment_and_signal_handlers_are_put_back_after_an_exception() -> None:
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGUSR2)
    received: list[int] = []

    def use() -> None:
        with environment({"ONLY": "1"}), signal_handler((signal.SIGUSR2,), lambda number, _: received.append(number)):
            assert dict(os.environ) == {"ONLY": "1"}
            os.environ["MORE"] = "2"
            signal.raise_signal(signal.SIGUSR2)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert received == [signal.SIGUSR2]
    assert dict(os.environ) == variables
    assert signal.getsignal(signal.SIGUSR2) == handler


def test_a_process_alone_has_its_own_handlers_again_after_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_PID, raising=False)
    earlier = [signal.getsignal(number) for number in STOP_SIGNALS]
    asked = StopRequest()
    signal.raise_signal(signal.SIGINT)
    assert asked()
    asked.release()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == earlier


def test_an_interrupt_waits_for_the_end_of_the_context_and_reaches_no_child() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            child = subprocess.run(
                ["sh", "-c", "kill -INT $$; kill -HUP $$; echo alive"], capture_output=True, check=True
            )
            done.append(child.stdout.decode())
            raise OSError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["alive\n"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}


def test_the_end_of_standard_input_interrupts() -> None:
    code = """
import sys, time
from launcher.process import interrupt_at_end_of_input
interrupt_at_end_of_input()
try:
    print("empty for others:", sys.stdin.read() == "", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "empty for others: True\n"
        assert process.communicate()[0] == "interrupted\n"


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
        raised = raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
        assert raised > soft // 2
        assert raise_open_files() == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_processes_that_poll_one_server_ask_less_often() -> None:
    assert [shared_interval(0.1, askers) for askers in (1, 100, 512, 2048)] == [0.1, 0.1, 0.512, 2.048]
    assert shared_interval(1, 512, per_s=50) == 10.24


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("raise KeyError('lost')", 1, "KeyError: 'lost'"), ("sys.exit('why')", 1, "why"), ("sys.exit(3)", 3, "")],
)
def test_a_worker_that_fails_tears_nothing_down_and_loses_nothing(end: str, status: int, words: str) -> None:
    """A teardown that hangs stands for that of NCCL's communicators after a failure."""
    code = f"""
import atexit, sys, threading, time
from launcher.process import prepare_worker, run_and_exit
class Communicator:
    def __del__(self): time.sleep(1000)
kept = Communicator()
def write():
    time.sleep(0.1); print("written by a thread")
def run():
    print("printed, in a buffer")
    atexit.register(lambda: print("checkpoint complete"))
    threading.Thread(target=write).start()
    {end}
prepare_worker()
run_and_exit(run, beat=lambda: None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    for each in ("printed, in a buffer", "written by a thread", "checkpoint complete", words):
        assert each in done.stdout
