"""Heartbeat: progress of each rank, in memory that the worker shares with its node's agent.

The worker writes a few numbers whenever it starts another part of its work, without a system call. The agent reads them
to detect a rank that makes no progress. The memory belongs to the agent and has no file name, so nothing is left on the
disk if the agent or a worker is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

# Environment variable with the path of that memory, for the workers.
PROGRESS = "LAUNCHER_PROGRESS"
_RECORD = struct.Struct("=7q")


class Phase(IntEnum):
    """Activity of a rank, in the order in which a window passes through them."""

    starting = 0
    data = 1
    computing = 2
    waiting = 3
    updating = 4
    evaluating = 5
    saving = 6
    ending = 7


class Wait(IntEnum):
    """Target of a wait: what the main thread waits for if it blocks in the launcher's own code."""

    io = 0  # files
    collective = 1  # other ranks, or a GPU whose kernels wait for them


# parts of a start, by `Progress.number` in Phase.starting
STARTS = (
    "Python and its imports",
    "importing torch and the task",
    "building the model, with the other ranks",
    "making the data",
    "loading a checkpoint",
)
IMPORTS = 1  # last index of STARTS that is still imports
_BUILDING = 2
_IO_PHASES = (Phase.data, Phase.saving)


@dataclass(frozen=True)
class Progress:
    """Progress of a rank.

    Args:
        beats: number of heartbeats so far; 0 before the first.
        phase: current activity.
        number: micro-batch, or batch of an evaluation, from 1; in Phase.starting an index of STARTS.
        window: windows started by the run, this one included; 0 before the first.
        step: optimizer step of the window, from 1; 0 before the first.
        wait: what the main thread waits for if it blocks.
        thread: identifier of the thread for which the main thread waits (``threading.get_ident``); 0: none.
    """

    beats: int
    phase: Phase
    number: int
    window: int
    step: int
    wait: Wait = Wait.io
    thread: int = 0

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Sort key of progress; comparable between ranks because all do the same things in the same order."""
        in_window = self.phase <= Phase.updating
        return self.window, 0 if in_window else self.phase, self.number, self.phase

    @property
    def description(self) -> str:
        """Description of the activity, for messages."""
        match self.phase:
            case Phase.starting:
                return f"its start: {STARTS[self.number]}"
            case Phase.data:
                doing = f"micro-batch {self.number}, waiting for its data"
            case Phase.computing:
                doing = f"micro-batch {self.number}, forward and backward pass"
            case Phase.waiting:
                doing = "its gradients, with the other ranks"
            case Phase.updating:
                doing = "its update"
            case Phase.evaluating:
                return f"the evaluation before step {self.step + 1}" + (f", batch {self.number}" if self.number else "")
            case Phase.saving:
                return f"the checkpoint before step {self.step + 1}"
            case Phase.ending:
                return "the end of the run"
        return f"step {self.step}, {doing}"


def address(file: int, local_rank: int) -> str:
    """Return the value of PROGRESS for a worker. ``file``: file descriptor of the memory in this process, its agent."""
    return f"/proc/{os.getpid()}/fd/{file}:{local_rank}"


def size_of(ranks: int) -> int:
    """Return the bytes of memory for this many ranks."""
    return ranks * _RECORD.size


def read_progress(memory: mmap.mmap, local_rank: int) -> Progress:
    """Return the last progress that a worker published."""
    beats, phase, number, window, step, wait, thread = _RECORD.unpack_from(memory, local_rank * _RECORD.size)
    return Progress(beats, Phase(phase), number, window, step, Wait(wait), thread)


class Heartbeat:
    """Worker's side of the heartbeat; has no effect until it is opened, or in a process without a watching agent."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_RECORD.size)
        self._offset = self._beats = self._number = self._window = self._step = 0
        self._phase, self._wait = Phase.starting, Wait.io

    def open(self) -> None:
        path, _, local_rank = os.environ.get(PROGRESS, "").rpartition(":")
        if path:
            with Path(path).open("r+b") as file:
                self._memory, self._offset = mmap.mmap(file.fileno(), 0), int(local_rank) * _RECORD.size

    def begin_window(self, window: int, step: int) -> None:
        self._window, self._step = window, step

    def beat(self, phase: Phase, number: int = 0) -> None:
        """Publish the progress. ``number``: micro-batch, or whatever else the phase counts.

        The phase implies what the rank waits for if it blocks: files while it reads data or saves, and during the
        start except for building the model; otherwise the other ranks.
        """
        self._beats, self._phase, self._number = self._beats + 1, phase, number
        reads = phase in _IO_PHASES or (phase is Phase.starting and number != _BUILDING)
        self._wait = wait = Wait.io if reads else Wait.collective
        _RECORD.pack_into(self._memory, self._offset, self._beats, phase, number, self._window, self._step, wait, 0)

    def again(self) -> None:
        """Publish progress within the same activity."""
        self.beat(self._phase, self._number)

    @contextmanager
    def waiting_for(self, wait: Wait, thread: int = 0) -> Generator[None]:
        """Declare what the body, or the decorated function, waits for if it blocks. No effect outside the main thread.

        Args:
            thread: identifier of the thread for which the main thread waits; that thread's stack shows what blocks.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = self._wait
        self._publish(wait, thread)
        try:
            yield
        finally:
            self._publish(before)

    def _publish(self, wait: Wait, thread: int = 0) -> None:
        self._wait = wait
        _RECORD.pack_into(
            self._memory, self._offset, self._beats, self._phase, self._number, self._window, self._step, wait, thread
        )


HEARTBEAT = Heartbeat()
