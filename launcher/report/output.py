"""Standard output of a command that must not wait for its reader."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, TextIO

# characters that wait for the reader; further text is left out
_MOST_WAITING = 2**20
_CHUNK_BYTES = 4096
_LOOK_EVERY_S = 0.05
# seconds without progress after which a reader counts as stalled
_STALLED_AFTER_S = 2.0


class Output:
    """Text file whose ``write`` never blocks between ``unblock`` and ``finish``: a thread writes then.

    A terminal that was stopped by Ctrl-S, or a pipe that nobody reads, would hold a stop request otherwise.

    Args:
        trim: strip trailing blanks, because rich pads every line of a table to the table's width.
    """

    def __init__(self, file: TextIO, *, trim: bool = False) -> None:
        self._file, self._trim = file, trim
        self._waiting = deque[str]()
        self._condition = threading.Condition()
        self._size = self._left_out = self._written = 0
        self._error: OSError | None = None
        self._descriptor: int | None = None  # None: write directly
        self._thread = threading.Thread()

    def write(self, text: str) -> int:
        """Write ``text``. Raises OSError, in unblocked mode that of an earlier text."""
        text = "\n".join(line.rstrip(" ") for line in text.split("\n")) if self._trim else text
        if self._descriptor is None:
            return self._file.write(text)
        with self._condition:
            if self._error is not None:
                raise self._error
            if self._size > _MOST_WAITING:
                self._left_out += text.count("\n")
            else:
                text = self._gap() + text
                self._waiting.append(text)
                self._size += len(text)
                self._condition.notify()
        return len(text)

    def _gap(self) -> str:
        lines, self._left_out = self._left_out, 0
        return f"\n--- {lines:,} lines are left out: the reader was too slow ---\n" if lines else ""

    def flush(self) -> None:
        if self._descriptor is None:
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def unblock(self) -> None:
        """From now on a thread writes; nothing changes for a file without a descriptor."""
        if self._descriptor is not None:
            return
        try:
            self._file.flush()
            descriptor = os.dup(self._file.fileno())
        except (OSError, ValueError):
            return
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._run, args=(descriptor,), daemon=True)
        self._thread.start()

    def finish(self, *, patient: bool) -> bool:
        """Wait until everything is written, and write directly again. Return False if the reader is stalled.

        Args:
            patient: wait for a stalled reader without limit.
        """
        if self._descriptor is None:
            return True
        seen, since = self._written, time.monotonic()
        while self._size and self._error is None:
            time.sleep(_LOOK_EVERY_S)
            if self._written != seen:
                seen, since = self._written, time.monotonic()
            elif not patient and time.monotonic() - since > _STALLED_AFTER_S:
                return False
        with self._condition:
            self._descriptor = None
            self._condition.notify()
        self._thread.join()
        if self._error is None and (gap := self._gap()):
            self.write(gap)
        return True

    def _run(self, descriptor: int) -> None:
        """Write to the descriptor, without Python's buffer: its lock would block the end of the interpreter."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._descriptor is None)
                if not self._waiting:
                    break
                text = self._waiting.popleft()
            try:
                data = memoryview(text.encode(encoding, errors="replace"))
                while data:
                    data = data[os.write(descriptor, data[:_CHUNK_BYTES]) :]
                    self._written += 1
            except OSError as error:
                self._error = error
                break
            with self._condition:
                self._size -= len(text)
        os.close(descriptor)
