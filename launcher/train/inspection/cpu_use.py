"""Use of this machine's cores by this process and by others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from launcher.process import children


class CpuUse:
    """CPU seconds since the construction: of this process and its loader processes, and of all processes on the cores
    that it may use.

    Args:
        stat: proc(5): the kernel's counters.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began, self._own_s, self._busy_s = time.perf_counter(), self._own(), self._busy()

    def since(self) -> dict[str, float]:
        own_s, busy_s = self._own() - self._own_s, self._busy() - self._busy_s
        return {"own_s": max(0.0, own_s), "busy_s": busy_s, "took_s": time.perf_counter() - self._began}

    def _own(self) -> float:
        ticks = 0
        for pid in children(os.getpid()):
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    def _busy(self) -> float:
        """Return the seconds that the kernel counts as used or taken away by a hypervisor."""
        ours, ticks = {f"cpu{number}" for number in os.sched_getaffinity(0)}, 0
        for line in self._stat.read_text().splitlines():
            name, *counts = line.split()
            if name in ours:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
