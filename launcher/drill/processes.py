"""Processes of a run on this host: those that the launcher started, not those that merely read its directory.

    python -m launcher.drill.processes RUN_DIR RUN_ID RANK|all

sends SIGKILL to one rank, or to all processes of the run. A drill runs this on the nodes of a job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.process import wait_until

OWN = b"launcher.drill.processes"
# modules that only read a run's directory
_LOOK_ON = (OWN.decode(), "launcher.train.checkpoint.diff")
# commands that execute a run, among all that take its directory
_COMMANDS = ("train", "resume")
_LOOK_EVERY_S = 0.02
# seconds; a process that is blocked in the kernel, as on a dead network disk, may never end
_DIES_WITHIN_S = 20.0


@dataclass(frozen=True)
class Process:
    """Process of this host. ``rank``: its RANK, if it belongs to the run."""

    pid: int
    parent: int
    command: str
    rank: int | None
    of_run: bool  # has torchrun's id of the run in its environment, as workers and their children do


def processes_of(run_dir: str, run_id: str) -> list[Process]:
    """Return the processes of a run.

    These are the launcher's processes that have the run's directory as an argument (`launch`, agent, mirror, Slurm's
    task and its srun), those that inherit the run's id (workers and their loaders), and all descendants of these, but
    not processes of this module.
    """
    everything = {process.pid: (process, ours) for process, ours in _everything(run_dir, run_id)}
    own = {pid for pid, (process, ours) in everything.items() if ours or process.of_run}
    found: list[Process] = []
    for pid, (process, _) in everything.items():
        line, above = {pid}, process.parent
        while above in everything and above not in line:  # ids may be reused during the search, so avoid cycles
            line.add(above)
            above = everything[above][0].parent
        if line & own and pid != os.getpid() and OWN.decode() not in process.command.split():
            found.append(process)
    return found


def _everything(run_dir: str, run_id: str) -> list[tuple[Process, bool]]:
    """Return this user's processes, each with True if it is the launcher's and has ``run_dir`` as an argument."""
    found: list[tuple[Process, bool]] = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            words, environment, parent = process.cmdline(), process.environ(), process.ppid()
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
        of_run = environment.get("TORCHELASTIC_RUN_ID") == run_id
        rank = int(environment["RANK"]) if of_run and "RANK" in environment else None
        executes = bool(words) and runs_jobs(words) and any(_within(word, run_dir) for word in words)
        found.append((Process(process.pid, parent, " ".join(words), rank, of_run), executes))
    return found


def runs_jobs(words: Sequence[str]) -> bool:
    """Return True if a command is part of a run's execution, unlike an editor, a pager or `launch logs`."""
    if Path(words[0]).name == "srun":
        return True
    options = 1
    while options < len(words) and words[options].startswith("-") and words[options] != "-m":
        options += 1
    program, arguments = words[options : options + 2], words[options + 1 :]
    if program[:1] == ["-m"]:
        program, arguments = program[1:], words[options + 2 :]
        if program and program[0].startswith(("launcher.", "submitit.")):
            return program[0] not in _LOOK_ON
    name = Path(program[0]).name if program else ""
    return name in ("launch", "launcher") and arguments[:1] != [] and arguments[0] in _COMMANDS


def _within(word: str, directory: str) -> bool:
    return word == directory or word.startswith(f"{directory}{os.sep}")


def worker_of(processes: list[Process], rank: int) -> Process | None:
    """Return the worker process of a rank. Its loaders have the same environment, but a worker as their parent."""
    ours = {process.pid for process in processes if process.of_run}
    return next((one for one in processes if one.rank == rank and one.of_run and one.parent not in ours), None)


def kill_rank(run_dir: str, run_id: str, rank: int) -> int | None:
    """Kill the worker of a rank. Return its process id, or None if it is not on this host."""
    worker = worker_of(processes_of(run_dir, run_id), rank)
    if worker is None:
        return None
    try:
        os.kill(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return worker.pid


def kill_all(run_dir: str, run_id: str, within_s: float = _DIES_WITHIN_S) -> tuple[int, list[Process]]:
    """Kill all processes of a run on this host.

    Returns:
        The number of processes killed, and those that are still alive after ``within_s`` seconds.
    """
    killed: set[int] = set()

    def none_left() -> bool:
        left = processes_of(run_dir, run_id)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed.add(process.pid)
        return not left

    if wait_until(none_left, within_s, _LOOK_EVERY_S):
        return len(killed), []
    return len(killed), processes_of(run_dir, run_id)


def in_words(left: Sequence[Process]) -> str:
    """Return a description of the processes that survived SIGKILL; empty if none did."""
    if not left:
        return ""
    return "still there after SIGKILL: " + ", ".join(f"process {one.pid} ({one.command[:100]})" for one in left)


def main(run_dir: str, run_id: str, whom: str) -> int:
    if whom != "all":
        return 0 if kill_rank(run_dir, run_id, int(whom)) else 1
    count, left = kill_all(run_dir, run_id)
    if left:
        print(in_words(left), file=sys.stderr)
    return 0 if count and not left else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
