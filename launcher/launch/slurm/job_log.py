"""Lines of Slurm and of the batch script in a job's output: what was killed, and whether srun has given up a node."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from launcher.rundir.files import Unreadable, open_file
from launcher.rundir.paths import RunPaths, SweepPaths

_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (?!Exited with )(.+?)\s*$", re.MULTILINE)
# bash's message, in the batch script
_KILLED_SRUN = re.compile(r": line \d+: +\d+ (Killed|Segmentation fault|Aborted|Bus error)\b.* srun --")
_SETUP = re.compile(r"^cluster\.setup: .+", re.MULTILINE)  # of submit.py
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
    return KilledTask(match[1], int(match[2]), _signal_name(match[3].removesuffix(" (core dumped)")))


def cause_of_end(paths: RunPaths, job: str, begin: int) -> str:
    """Return what ended the job, from its output after byte ``begin``: a killed task or srun, or a line of
    cluster.setup; empty if none of them."""
    if (task := killed_task(paths, job, begin)) is not None:
        return str(task)
    text = _text(paths, job, begin)
    if match := _KILLED_SRUN.search(text):
        return f"srun, which ran the tasks from the job's first node, was killed: {_signal_name(match[1])}"
    return match[0] if (match := _SETUP.search(text)) else ""


def _signal_name(text: str) -> str:
    return next((each.name for each in signal.Signals if signal.strsignal(each) == text), text)


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
