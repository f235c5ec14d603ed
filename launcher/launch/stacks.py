"""Stacks of a worker: requested by a signal, read from its log, and what they show.

A worker handles STACK_SIGNAL in C (faulthandler): the handler writes to the worker's own log even while Python is
blocked, waits in a system call, or holds the interpreter's lock.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.heartbeat import Wait
from launcher.process import STACK_SIGNAL, children, handles, state_of

_ANSWERS_WITHIN_S, _QUIET_S, _LOOK_EVERY_S = 3.0, 0.3, 0.05
_ALL_WITHIN_S = 5.0  # no further loader process is asked after this time
_MOST_BYTES = 32_000
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# standard library frames: they wait on behalf of their caller
_STDLIB = re.compile(r"/python3[^/]*/(?!site-packages|dist-packages)|^<frozen")
# packages of torch in which a rank waits for others: collectives, and the backward pass, which ends with DDP's
_TORCH_WAITS = re.compile(r"/torch/(distributed/(?!checkpoint/)|autograd/|futures/)")


@dataclass(frozen=True)
class Stacks:
    """Stacks of a process and its loaders.

    Args:
        text: the stacks; empty without an answer.
        missing_reason: reason for a missing answer.
        wait, thread: those of the rank's heartbeat.
        moved: True if the rank has made progress since it was suspected.
    """

    text: str
    missing_reason: str = ""
    wait: Wait = Wait.io
    thread: int = 0
    moved: bool = False

    @property
    def shown_thread(self) -> str:
        """Stack of the thread that shows what the process is doing, innermost frame first.

        This is the main thread, which is the oldest and so the last in the dump, or the thread for which it waits.
        """
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        awaited = (thread for thread in threads if self.thread and f"hread 0x{self.thread:016x} " in thread)
        return next(awaited, threads[-1]).strip()

    @property
    def location(self) -> str:
        """Innermost frame outside the standard library and torch, as ``FILE:LINE in FUNCTION``."""
        frames = _frames(self.shown_thread)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """True if the process waits for other ranks: in torch, or in the launcher's code as its heartbeat declares."""
        if self.thread and f"0x{self.thread:016x} " not in self.text:
            return bool(self.text)  # the thread has just ended, so the rank moves
        for file, _, name in _frames(self.shown_thread):
            if "/torch/" in file:
                return bool(_TORCH_WAITS.search(file)) or name == "synchronize"
            return self.wait is Wait.collective and "/launcher/train/" in file
        return False


def _frames(thread: str) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of each frame outside the standard library, innermost first."""
    return [frame for frame in _FRAME.findall(thread) if not _STDLIB.search(frame[0])]


def request_all_stacks(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Stacks]:
    """Call ``request_stacks`` for all ranks in parallel. ``workers``: (process id, log) by rank."""
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        answers = {rank: threads.submit(request_stacks, pid, log) for rank, (pid, log) in workers.items()}
    return {rank: answer.result() for rank, answer in answers.items()}


def request_stacks(pid: int, log: Path) -> Stacks:
    """Have ``pid`` and its loader processes write their stacks into ``log``, and return them.

    The requests are sent one after the other, because their standard error shares this log. The call takes a few
    seconds at most, however many processes do not answer.
    """
    end = time.monotonic() + _ALL_WITHIN_S
    if (state := state_of(pid)) in ("T", "t"):
        return Stacks("", f"the process is stopped (state {state}: SIGSTOP, or a debugger), and cannot show its stack")
    if not handles(pid, STACK_SIGNAL):
        return Stacks("", "the process has not yet installed the signal handler that shows its stack")
    if not (text := _answer(pid, log)):
        return Stacks("", f"the process (state {state_of(pid) or 'gone'}) does not show its stack")
    for child in children(pid):
        if time.monotonic() < end and handles(child, STACK_SIGNAL) and (more := _answer(child, log)):
            text += f"\n--- its process {child} ---\n{more}"
    return Stacks(text)


def _answer(pid: int, log: Path) -> str:
    """Send STACK_SIGNAL and return the stacks that are appended to the log; empty if the process or its log is gone."""
    try:
        before = log.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        size, since, end = before, time.monotonic(), time.monotonic() + _ANSWERS_WITHIN_S
        while time.monotonic() < end and (size == before or time.monotonic() - since < _QUIET_S):
            time.sleep(_LOOK_EVERY_S)
            if (now := log.stat().st_size) != size:
                size, since = now, time.monotonic()
        with log.open("rb") as file:
            file.seek(before)
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    begin = re.search(r"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].rstrip() if begin else ""
