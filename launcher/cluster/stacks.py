"""Where the threads of another process stand, asked of the process itself.

A worker has a handler for ASK that runs in C (faulthandler): it answers while Python is blocked, waits in a system
call, or holds the interpreter's lock, and it writes to the worker's own log.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.procfs import children, handles, state_of
from launcher.process import STACK_SIGNAL

_ANSWERS_WITHIN_S, _QUIET_S, _LOOK_EVERY_S = 3.0, 0.3, 0.05
_MOST_BYTES = 32_000
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# code that waits on behalf of whoever called it
_STDLIB = re.compile(r"/python3[^/]*/(?!site-packages|dist-packages)|^<frozen")
# where a rank stands that waits for others: in a collective, in the backward pass that DDP's collectives end, or in the
# engine's own waits
_WAITS = re.compile(
    r"/torch/(distributed/(?!checkpoint/)|autograd/|futures/)|/launcher/train/(step|exchange|ddp|powersgd)\.py"
)


@dataclass(frozen=True)
class Stacks:
    """What a process answered. ``text``: of all its threads, and its loader processes'; empty without an answer, and
    then ``why`` says why."""

    text: str
    why: str = ""

    @property
    def main(self) -> str:
        """The main thread's part, innermost frame first: the dump has the oldest thread last."""
        threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", self.text.partition("\n---")[0])
        return threads[-1].strip()

    @property
    def place(self) -> str:
        """``FILE:LINE in FUNCTION``, of the innermost frame that is neither Python's library nor torch's."""
        frames = [(file, line, name) for file, line, name in _FRAME.findall(self.main) if not _STDLIB.search(file)]
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        for file, line, name in own or frames:
            return f"{file}:{line} in {name}"
        return ""

    @property
    def waits(self) -> bool:
        """Whether the main thread waits for other ranks, as far as Python's frames tell."""
        for file, _, _ in _FRAME.findall(self.main):
            if not _STDLIB.search(file):
                return bool(_WAITS.search(file))
        return False


def ask(pid: int, log: Path) -> Stacks:
    """Have ``pid``, and the processes that load its data, write their stacks into ``log``, to which their standard
    error goes."""
    if (state := state_of(pid)) in ("T", "t"):
        return Stacks("", f"the process is stopped (state {state}: SIGSTOP, or a debugger), and cannot show its stack")
    if not handles(pid, STACK_SIGNAL):
        return Stacks("", "the process has not come to where it could show its stack")
    text = _answer(pid, log)
    if not text:
        return Stacks("", f"the process (state {state_of(pid) or 'gone'}) does not show its stack")
    for child in children(pid):
        if handles(child, STACK_SIGNAL) and (more := _answer(child, log)):
            text += f"\n--- its process {child} ---\n{more}"
    return Stacks(text)


def _answer(pid: int, log: Path) -> str:
    try:
        before = log.stat().st_size
    except OSError:
        return ""
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    size, since, end = before, time.monotonic(), time.monotonic() + _ANSWERS_WITHIN_S
    while time.monotonic() < end and (size == before or time.monotonic() - since < _QUIET_S):
        time.sleep(_LOOK_EVERY_S)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
    with log.open("rb") as file:
        file.seek(before)
        text = file.read(_MOST_BYTES).decode(errors="replace")
    begin = re.search(r"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].rstrip() if begin else ""
