"""Who hangs, by how far the ranks are and what their stacks say; and the answers of processes that are stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import heartbeat
from launcher.heartbeat import Phase, Progress, Wait
from launcher.launch import hang_verdict, rendezvous
from launcher.launch.hang_verdict import RankState, Stacks, judge_hang, request_stacks, silent_host, suspects
from launcher.launch.watchdog import HangWatch
from tests.helpers import make_plan
from tests.infra.runs import wait_for

T = 10.0


def seen(rank: int, window: int, number: int, phase: Phase = Phase.computing, quiet_s: float = T) -> RankState:
    return RankState(rank, rank // 2, f"host{rank // 2}", Progress(9, phase, number, window, window), quiet_s)


def waits(rank: int) -> Stacks:
    text = f'Thread 0x{rank:x} (most recent call first):\n  File "/launcher/train/loop.py", line 1 in f'
    return Stacks(text, wait=Wait.collective)


STUCK_IN_LOSS = Stacks('Thread 0x1 (most recent call first):\n  File "my.py", line 7 in loss', wait=Wait.collective)
STOPPED = Stacks("", "the process is stopped")


def test_the_one_behind_is_suspected_and_not_those_who_wait_for_it() -> None:
    ranks = [seen(0, 3, 8), seen(1, 3, 8, Phase.waiting), seen(2, 3, 5), seen(3, 3, 8)]
    assert [one.rank for one in suspects(ranks, T)] == [2]
    assert [one.rank for one in suspects([seen(0, 3, 5), seen(1, 3, 5, Phase.data)], T)] == [1]
    assert [one.rank for one in suspects([seen(0, 3, 1, Phase.evaluating), seen(1, 3, 8, Phase.updating)], T)] == [1]
    assert [one.rank for one in suspects([seen(0, 4, 1, Phase.data), seen(1, 3, 0, Phase.saving)], T)] == [1]


def test_waiting_for_a_slow_rank_is_no_hang_however_long() -> None:
    assert suspects([seen(0, 3, 8, quiet_s=100 * T), seen(1, 3, 5, quiet_s=T / 2)], T) == []
    assert suspects([seen(0, 3, 8, quiet_s=T), seen(1, 3, 8, quiet_s=T / 2)], T) == [], "it has just come there"
    assert suspects([], T) == []


def test_imports_may_take_longer_than_a_short_limit() -> None:
    importing = seen(1, 0, 1, Phase.starting, quiet_s=T)
    assert suspects([seen(0, 0, 2, Phase.starting), importing], T) == []
    assert suspects([seen(0, 0, 2, Phase.starting), seen(1, 0, 1, Phase.starting, quiet_s=300)], T) != []


def test_of_ranks_at_one_place_the_one_that_does_not_wait_is_named() -> None:
    behind = [seen(0, 3, 8), seen(1, 3, 8), seen(2, 3, 8)]
    verdict = judge_hang(behind, {0: waits(0), 1: STUCK_IN_LOSS, 2: waits(2)}, T)
    assert (verdict.rank, verdict.victim, verdict.node, verdict.host) == (1, 1, 0, "host0")
    assert "host0 in step 3, micro-batch 8, forward and backward pass: nothing moved for 10 s" in verdict.text
    assert verdict.text.endswith("at my.py:7 in loss")
    assert verdict.stack == STUCK_IN_LOSS.text
    stopped = judge_hang(behind, {0: waits(0), 1: waits(1), 2: STOPPED}, T)
    assert (stopped.rank, stopped.text.rpartition("; ")[2]) == (2, "the process is stopped")


def test_one_whose_agent_gave_no_answer_is_named_only_where_nobody_else_can_be() -> None:
    behind = [seen(0, 3, 8), seen(1, 3, 8), seen(2, 3, 8)]
    assert judge_hang(behind, {0: waits(0), 2: STOPPED}, T).rank == 2, "and not rank 1, of which nothing is known"
    assert judge_hang(behind, {2: STUCK_IN_LOSS}, T).rank == 2
    verdict = judge_hang(behind, {0: waits(0), 1: waits(1)}, T)
    assert (verdict.rank, verdict.host) == (2, "host1")
    unknown = "; its agent did not send its stack"
    assert verdict.text.endswith(f"{unknown}, and the ranks that answered wait for others")
    verdict = judge_hang(behind, {0: waits(0)}, T)
    assert verdict.rank == 1
    assert verdict.text.endswith("No stack came from rank 2 either, which may be the cause instead.")
    assert judge_hang([seen(2, 3, 8)], {}, T).text.endswith(unknown), "it alone is behind"


def test_where_all_wait_all_are_named() -> None:
    verdict = judge_hang([seen(0, 3, 8), seen(3, 3, 8)], {0: waits(0), 3: waits(3)}, T)
    assert (verdict.rank, verdict.victim) == (None, 0)
    assert "rank 0 on host0: at /launcher/train/loop.py:1 in f" in verdict.text
    assert "rank 3 on host1: at /launcher/train/loop.py:1 in f" in verdict.text
    assert f"--- rank 0 ---\n{waits(0).text}" in verdict.stack
    assert f"--- rank 3 ---\n{waits(3).text}" in verdict.stack
    gone = silent_host(1, "host1", seen(0, 3, 8), T)
    assert (gone.rank, gone.victim, gone.node, gone.host) == (None, 0, 1, "host1")
    assert "node 1 (host1) hangs: its agent has sent no report" in gone.text


def test_one_that_waits_where_nobody_else_is_as_far_behind_is_named() -> None:
    """Such as the only rank of a job, whose GPU kernel does not end."""
    verdict = judge_hang([seen(0, 3, 8, Phase.waiting)], {0: waits(0)}, T)
    assert (verdict.rank, verdict.victim, verdict.host) == (0, 0, "host0")
    waits_at = "nothing moved for 10 s (train.hang_timeout); it waits at /launcher/train/loop.py:1 in f. A collective"
    assert waits_at in verdict.sentence
    assert "each other" not in verdict.sentence
    assert verdict.stack == waits(0).text


STUCK = """
import ctypes, signal, sys, threading, time
from launcher import heartbeat
from launcher.process import show_stacks_when_asked
heartbeat.HEARTBEAT.open()
def sleeps():
    time.sleep(1000)
def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def holds_the_interpreter():
    while True:
        ctypes.PyDLL(None).sleep(1000)
def hung_disk(*arguments):
    time.sleep(1000)
def resumes_on_a_dead_disk():
    from pathlib import Path
    from types import SimpleNamespace
    from launcher.train import metrics
    record = Path(sys.argv[0]).with_name("metrics.jsonl")
    record.touch()
    metrics.shutil.copyfileobj = hung_disk
    plan = SimpleNamespace(paths=SimpleNamespace(metrics=record))
    heartbeat.HEARTBEAT.beat(heartbeat.Phase.evaluating)  # the evaluation that is tried before the first step
    print("here", flush=True)
    metrics.open_record(plan, SimpleNamespace(check=lambda: None), 0, None)
def waits_for_a_save():
    from types import SimpleNamespace
    from launcher.train.checkpoint import async_save, save
    save.write = hung_disk
    class Unmade(async_save.Saver):
        def __init__(self):
            self._group = self._error = None
            self._totals = SimpleNamespace()
            self._thread = threading.Thread(target=self._write_in_background, args=(None, ""), daemon=True)
    waiting = Unmade()
    waiting._thread.start()
    print("here", flush=True)
    waiting.wait()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
show_stacks_when_asked()
if sys.argv[1] not in ("waits_for_a_save", "resumes_on_a_dead_disk"):
    print("here", flush=True)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "stuck.py").write_text(STUCK)
    return tmp_path / "log"


def stuck(how: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(log.with_name("stuck.py")), how], stdout=file, stderr=subprocess.STDOUT
        )
    wait_for(lambda: "here" in log.read_text(), "the process to be where it is stuck")
    return process


@pytest.mark.parametrize("how", ["sleeps", "waits_for_a_lock", "holds_the_interpreter"])
def test_a_process_that_is_stuck_shows_where(how: str, log: Path) -> None:
    process = stuck(how, log)
    try:
        said = request_stacks(process.pid, log)
        assert "stuck.py:" in said.location
        assert said.location.endswith(f" in {how}")
        assert not said.waits
        assert said.text.count("(most recent call first)") == 2, "the other thread is shown too"
        assert said.text in log.read_text()
        assert process.poll() is None, "and it lives on"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits_for_a_save", "resumes_on_a_dead_disk"])
def test_a_rank_whose_disk_is_dead_hangs_and_does_not_wait_for_others(
    how: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is written in the background, and while a resumed run truncates its record."""
    watch = HangWatch(make_plan(run_dir=str(log.parent)), rendezvous.ALONE, T, lambda: None)
    monkeypatch.setenv(heartbeat.PROGRESS, watch.begin({0: (0, log)})[0])
    process = stuck(how, log)
    try:
        wait_for(lambda: "in hung_disk" in request_stacks(process.pid, log).text, "the disk to hang")
        attempt = watch._current
        assert attempt is not None
        attempt.pids = {0: process.pid}
        answer = watch._answers(attempt, [(0, heartbeat.read_progress(watch._memory, 0).beats)])[0]
        assert answer.location.endswith(" in hung_disk")
        assert not answer.waits
        assert judge_hang([seen(0, 3, 8), seen(1, 3, 8)], {0: answer, 1: waits(1)}, T).rank == 0
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_cannot_say_anything_and_that_is_said(log: Path) -> None:
    process = stuck("sleeps", log)
    try:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: "stopped" in request_stacks(process.pid, log).missing_reason, "the process to be stopped")
        assert not request_stacks(process.pid, log).text
    finally:
        process.kill()
        process.wait()


def test_a_process_without_a_handler_is_not_killed_by_the_question(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert "not yet installed" in request_stacks(process.pid, tmp_path / "log").missing_reason
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


PYTHON, SITE, HERE = "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages", "/src/launcher/train"
JOIN = [(f"{PYTHON}/threading.py", "_wait_for_tstate_lock"), (f"{PYTHON}/threading.py", "join")]
LOOP = [(f"{HERE}/trainer.py", "train")]
COLLECTIVE = (f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce")
WRITER = [
    (f"{HERE}/checkpoint/async_save.py", "_write"),
    (f"{HERE}/checkpoint/async_save.py", "_write_beside"),
    (f"{PYTHON}/threading.py", "run"),
]


def dump(*threads: list[tuple[str, str]], wait: Wait = Wait.collective, waits_for: int = 0) -> Stacks:
    """Stacks as faulthandler writes them: the main thread last, each thread from its innermost frame on."""
    shown = [
        f"Thread 0x{number:016x} (most recent call first):\n"
        + "\n".join(f'  File "{file}", line 7 in {name}' for file, name in thread)
        for number, thread in enumerate(threads, 1)
    ]
    text = "\n\n".join(shown) + "\n--- its process 12 ---\nThread 0x1 (most recent call first):"
    return Stacks(text, "", wait, waits_for)


def test_where_the_main_thread_waits_for_a_save_its_writer_tells() -> None:
    main = [*JOIN, (f"{HERE}/checkpoint/async_save.py", "wait"), (f"{HERE}/checkpoint/async_save.py", "save"), *LOOP]
    other = [(f"{PYTHON}/threading.py", "wait"), (f"{SITE}/tqdm/_monitor.py", "run")]
    disk = [
        (f"{HERE}/checkpoint/file_format.py", "flush"),
        (f"{SITE}/torch/distributed/checkpoint/filesystem.py", "write_data"),
    ]
    stuck = dump(other, [*disk, (f"{HERE}/checkpoint/save.py", "write"), *WRITER], main, wait=Wait.io, waits_for=2)
    assert not stuck.waits
    assert stuck.location == f"{HERE}/checkpoint/file_format.py:7 in flush"
    creating = [(f"{PYTHON}/pathlib.py", "mkdir"), (f"{HERE}/checkpoint/save.py", "_begin"), *WRITER]
    begin = dump(creating, other, main, wait=Wait.io, waits_for=1)
    assert not begin.waits
    assert begin.location == f"{HERE}/checkpoint/save.py:7 in _begin"
    patient = dump([COLLECTIVE, (f"{HERE}/world.py", "of_all"), *WRITER], main, wait=Wait.io, waits_for=1)
    assert patient.waits
    over = dump(other, main, wait=Wait.io, waits_for=7)
    assert over.waits, "the writer has just ended: nothing is known of this rank"
    assert over.location == f"{HERE}/checkpoint/async_save.py:7 in wait"


@pytest.mark.parametrize(
    "innermost",
    [
        COLLECTIVE,
        (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"),
        (f"{SITE}/torch/cuda/streams.py", "synchronize"),
        (f"{HERE}/engine/optimizer_step.py", "_fitting_scale"),
        (f"{HERE}/trainer.py", "_evaluated"),
        (f"{HERE}/engine/calibration.py", "slowest_s"),
        (f"{HERE}/parallel/replicas.py", "share"),
        (f"{HERE}/engine/window_totals.py", "summed"),
    ],
)
def test_the_launchers_own_code_waits_for_the_gpu_and_so_for_others(innermost: tuple[str, str]) -> None:
    assert dump([innermost, *LOOP]).waits


@pytest.mark.parametrize(
    "innermost",
    [
        ("/home/me/tasks.py", "loss"),
        (f"{SITE}/torch/nn/modules/module.py", "_call_impl"),
        (f"{SITE}/torch/distributed/checkpoint/filesystem.py", "read_data"),
    ],
)
def test_a_rank_that_runs_other_code_than_collectives_does_not_wait(innermost: tuple[str, str]) -> None:
    assert not dump([(f"{PYTHON}/socket.py", "recv"), innermost, *LOOP]).waits


@pytest.mark.parametrize("module", ["data/loader", "checkpoint/resume", "metrics", "trainer"])
def test_a_rank_that_declares_io_does_not_wait_whatever_the_file(module: str) -> None:
    frame = (f"{HERE}/{module}.py", "f")
    assert not dump([(f"{PYTHON}/pathlib.py", "rename"), frame, *LOOP], wait=Wait.io).waits
    assert dump([COLLECTIVE, frame, *LOOP], wait=Wait.io).waits, "a collective between two files"


def test_a_process_that_says_nothing_waits_for_no_one() -> None:
    assert not Stacks("").waits
    assert Stacks("").location == ""


def test_all_ranks_are_asked_before_any_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the last of them would not answer in time."""
    asked: list[int] = []

    def ask(pid: int, log: Path) -> Stacks:
        asked.append(pid)
        for _ in range(600):  # a guard only
            if len(asked) == 8:
                return Stacks(f"{pid} {log}")
            time.sleep(0.05)
        return Stacks("", "the others were not asked")

    monkeypatch.setattr(hang_verdict, "request_stacks", ask)
    said = hang_verdict.request_all_stacks({rank: (100 + rank, Path(f"log{rank}")) for rank in range(8)})
    assert said == {rank: Stacks(f"{100 + rank} log{rank}") for rank in range(8)}
    assert hang_verdict.request_all_stacks({}) == {}
