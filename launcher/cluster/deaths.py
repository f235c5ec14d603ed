"""In which order the workers ended: who failed first, and who only lost a peer or was ended by the agent."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

POLL_S = 0.02


class DeathWatch(threading.Thread):
    """Watches this process's children while it is entered. torch's own time stamps are whole seconds, and it counts the
    workers that it killed itself among the failed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seen: dict[int, float] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def time(self, pid: int) -> datetime:
        """When ``pid`` was last seen alive, by the clock on the wall; now, for one whose end was not seen."""
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - self._seen.get(pid, time.monotonic()))

    def run(self) -> None:
        living: set[int] = set()
        looked = time.monotonic()
        while not self._over.wait(POLL_S):
            before, looked = looked, time.monotonic()
            now = {pid for pid in _children() if _lives(pid)}
            for pid in living - now:
                self._seen.setdefault(pid, before)
            living = now


def _children() -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # that thread has ended
            continue
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
