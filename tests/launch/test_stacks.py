"""What a process's stacks tell: which thread is asked, and whether it waits for other ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.heartbeat import Wait
from launcher.launch import stacks
from launcher.launch.stacks import Stacks

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

    monkeypatch.setattr(stacks, "request_stacks", ask)
    said = stacks.request_all_stacks({rank: (100 + rank, Path(f"log{rank}")) for rank in range(8)})
    assert said == {rank: Stacks(f"{100 + rank} log{rank}") for rank in range(8)}
    assert stacks.request_all_stacks({}) == {}
