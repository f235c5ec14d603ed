"""In which order the workers ended: who failed first, and who only lost a peer or was ended by the agent."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Self

from launcher.cluster.procfs import children, state_of

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
            now = {pid for pid in children(os.getpid()) if state_of(pid) not in (None, "Z")}
            for pid in living - now:
                self._seen.setdefault(pid, before)
            living = now
