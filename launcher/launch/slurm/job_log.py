"""Lines that Slurm itself writes into a job's output: which task was killed, and whether srun has given up a node."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from launcher.rundir.files import Unreadable, open_file
from launcher.rundir.paths import RunPaths, SweepPaths

_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (?!Exited with )(.+?)\s*$", re.MULTILINE)
_GIVEN_UP = re.compile(r"^srun: error: (Cannot communicate with node|Aborting, io error)", re.MULTILINE)
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class KilledTask:
    """Task of a job step that a signal ended. ``node``: number of the task, which is that of its node in the job."""

    host: str
    node: int
    how: str

    def __str__(self) -> str:
        return f"Slurm's task {self.node} on {self.host}, which ran the launcher's agent, was killed: {self.how}"


def file_of_output(paths: RunPaths, job: str) -> Path:
    """Return the file with the output of the job's batch script; cells of a sweep have it in the sweep's directory."""
    name = f"{job}_0_log.out"
    files = [folder / name for folder in (paths.slurm, SweepPaths(paths.root.parent).slurm)]
    return next((file for file in files if file.exists()), files[0])


def output_size(paths: RunPaths, job: str) -> int:
    """Return the size of that file in bytes: a restarted job appends to it."""
    try:
        return file_of_output(paths, job).stat().st_size
    except OSError:
        return 0


def killed_task(paths: RunPaths, job: str, begin: int) -> KilledTask | None:
    """Return the first task of the job that srun reports as killed after byte ``begin`` of the output, or None."""
    if (match := _KILLED.search(_text(paths, job, begin))) is None:
        return None
    numbers = {signal.strsignal(number): number.name for number in signal.Signals}
    how = match[3].removesuffix(" (core dumped)")
    return KilledTask(match[1], int(match[2]), numbers.get(how, how))


def gave_up(paths: RunPaths, job: str, begin: int) -> bool:
    """Return True if srun aborts the step because it does not reach one of the nodes' slurmstepd."""
    return _GIVEN_UP.search(_text(paths, job, begin)) is not None


def _text(paths: RunPaths, job: str, begin: int) -> str:
    """Return the first 64 KiB of the output after byte ``begin``."""
    try:
        with open_file(file_of_output(paths, job)) as file:
            file.seek(begin, os.SEEK_SET)
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, Unreadable):
        return ""
