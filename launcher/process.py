"""Processes: signals and output of our own, and what /proc says of others."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TextIO, cast

# What asks a worker to stop after its window: from the agent, a scheduler, or a person.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# On this one a worker writes the stacks of its threads into its log.
STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


# Where the agent leaves its process id for its workers.
AGENT_PID = "LAUNCHER_AGENT_PID"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when ``parent`` dies, however that happens: no orphan is left.

    ``parent``: the process that this one was started by, as that process knew it: asking here for one's parent is too
    late when it has died already. On a system without prctl(2) nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


class StopShield:
    """A parent of workers, and the signals to stop: the first one is kept in ``asked``, for whoever looks. None is
    raised as an exception: it would come up in any code, logging or an import, that takes it for an error of its own.

    Children start with these signals blocked, until they have handlers of their own and call ``lower_shield``: none may
    meet one before it can handle it. They inherit that from the main thread, so another thread takes the signals here;
    Python runs the handlers in the main thread all the same.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._over = threading.Event()
        self._taker = threading.Thread(target=self._take, daemon=True)

    def _take(self) -> None:
        lower_shield()
        self._over.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.asked = self.asked or signal.Signals(number)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._taker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._taker.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def lower_shield() -> None:
    """Take signals to stop from here on, the one that came meanwhile too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def join_output_streams() -> None:
    """Let standard error go where standard output goes: one log a rank, in the order of what happened."""
    sys.stderr.flush()
    os.dup2(1, 2)


class _Unfailing:
    """A stream whose disk may be full: what does not get through stays in its buffer, and training goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def never_fail_to_print() -> None:
    """A log on a full disk ends no run: whether it goes on is decided where checkpoints and the record are written."""
    sys.stdout, sys.stderr = cast("TextIO", _Unfailing(sys.stdout)), cast("TextIO", _Unfailing(sys.stderr))


# From this line on a rank's log is the end of that rank. The terminal echoes rank 0 up to here: which rank failed
# first, and its traceback, is the verdict's to say, not that of a rank that merely lost its peer.
LAST_WORDS = "=== this rank ended with an exception ==="


def show_stacks_when_asked() -> None:
    """STACK_SIGNAL writes what every thread is at to standard error, even while Python itself is blocked."""
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)


def mark_last_words() -> None:
    """Have an uncaught exception write LAST_WORDS into the log, before its traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(LAST_WORDS, file=sys.stderr, flush=True)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def leave(status: int) -> NoReturn:
    """End this process as the interpreter would, but for taking itself apart.

    gloo's threads may still hold the tensors of the last collective; when they let go of them while the interpreter is
    being torn down, the process aborts ("terminate called without an active exception"), and a job that is done looks
    failed (pytorch/pytorch#190489; three exits in eight of a ten-line DDP script, torch 2.13).
    """
    threading._shutdown()  # pyright: ignore  (waits for threads as the interpreter does, executors' among them)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # that thread has ended
            continue
    return found


def state_of(pid: int) -> str | None:
    """One letter, as proc(5) has it: Z has ended, T is stopped, D waits for a disk; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether its environment, as it was started, says so."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def handles(pid: int, signal: int) -> bool:
    """Whether it has a handler for ``signal``, which would end it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal - 1) & 1)
