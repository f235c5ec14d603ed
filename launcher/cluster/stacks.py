"""Where the threads of another process stand, asked of the process itself.

A worker has a handler for ASK that runs in C (faulthandler): it answers while Python is blocked, waits in a system
call, or holds the interpreter's lock, and it writes to the worker's own log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.procfs import children, handles, state_of
from launcher.process import STACK_SIGNAL

_ANSWERS_WITHIN_S, _QUIET_S, _LOOK_EVERY_S = 3.0, 0.3, 0.05
_ALL_WITHIN_S = 5.0  # until the last loader process is asked
_MOST_BYTES = 32_000
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# code that waits on behalf of whoever called it
_STDLIB = re.compile(r"/python3[^/]*/(?!site-packages|dist-packages)|^<frozen")
# where a rank stands that waits for others: in a collective, in the backward pass that DDP's collectives end, or in the
# launcher's own code, which does nothing there but wait for the GPU, whose kernels wait for the other ranks. Not so
# what reads and writes: a disk that does not answer is no other rank
_WAITS = re.compile(
    r"/torch/(distributed/(?!checkpoint/)|autograd/|futures/)|/launcher/train/(?!(checkpoint|cutback|data|feed|files|"
    r"held_out|loader|manifest|restore|room|safeload|stream|telemetry)\.py)"
)
_SAVER = "/launcher/train/saver.py"


@dataclass(frozen=True)
class Stacks:
    """What a process answered. ``text``: of all its threads, and its loader processes'; empty without an answer, and
    then ``why`` says why."""

    text: str
    why: str = ""

    @property
    def telling(self) -> str:
        """The part of the thread that tells what the process is at, innermost frame first: the main thread, which is
        the oldest and so the last in the dump; where that waits for the save under way, the thread that writes it."""
        *others, main = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        innermost = next(iter(_frames(main)), None)
        if innermost is not None and innermost[0].endswith(_SAVER):
            for thread in others:
                if any(file.endswith(_SAVER) and name.startswith("_write") for file, _, name in _frames(thread)):
                    return thread.strip()
        return main.strip()

    @property
    def place(self) -> str:
        """``FILE:LINE in FUNCTION``, of the innermost frame that is neither Python's library nor torch's."""
        frames = _frames(self.telling)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as Python's frames tell."""
        for file, _, name in _frames(self.telling):
            return bool(_WAITS.search(file)) or ("/torch/" in file and name == "synchronize")
        return False


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """File, line and function, without Python's own library, innermost first."""
    return [frame for frame in _FRAME.findall(thread) if not _STDLIB.search(frame[0])]


def ask_all(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Stacks]:
    """``ask`` of each rank's process and log, all at the same time: together they take no longer than one."""
    with ThreadPoolExecutor(max(1, len(workers))) as asking:
        said = {rank: asking.submit(ask, pid, log) for rank, (pid, log) in workers.items()}
    return {rank: answer.result() for rank, answer in said.items()}


def ask(pid: int, log: Path) -> Stacks:
    """Have ``pid``, and the processes that load its data, write their stacks into ``log``, to which their standard
    error goes: one after the other, for they share it. It takes a few seconds, however many do not answer."""
    end = time.monotonic() + _ALL_WITHIN_S
    if (state := state_of(pid)) in ("T", "t"):
        return Stacks("", f"the process is stopped (state {state}: SIGSTOP, or a debugger), and cannot show its stack")
    if not handles(pid, STACK_SIGNAL):
        return Stacks("", "the process has not come to where it could show its stack")
    text = _answer(pid, log)
    if not text:
        return Stacks("", f"the process (state {state_of(pid) or 'gone'}) does not show its stack")
    for child in children(pid):
        if time.monotonic() < end and handles(child, STACK_SIGNAL) and (more := _answer(child, log)):
            text += f"\n--- its process {child} ---\n{more}"
    return Stacks(text)


def _answer(pid: int, log: Path) -> str:
    try:
        text = _written(pid, log)
    except OSError:  # the process is gone, or its log
        return ""
    begin = re.search(r"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].rstrip() if begin else ""


def _written(pid: int, log: Path) -> str:
    """What the signal brings into the log. Raises OSError."""
    before = log.stat().st_size
    os.kill(pid, STACK_SIGNAL)
    size, since, end = before, time.monotonic(), time.monotonic() + _ANSWERS_WITHIN_S
    while time.monotonic() < end and (size == before or time.monotonic() - since < _QUIET_S):
        time.sleep(_LOOK_EVERY_S)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
    with log.open("rb") as file:
        file.seek(before)
        return file.read(_MOST_BYTES).decode(errors="replace")
