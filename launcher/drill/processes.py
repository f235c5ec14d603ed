"""The processes of a run on this host, found by what they were started with.

    python -m launcher.drill.processes RUN_DIR RUN_ID RANK|all

sends SIGKILL to one rank, or to all that there is: so a drill reaches a node.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWN = b"launcher.drill.processes"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    rank: int | None
    of_run: bool  # by torchrun's id of the run, which a worker's children inherit


def processes_of(run_dir: str, run_id: str) -> list[Process]:
    """`launch`, the agent and the mirror, which name the run's directory, Slurm's task and its srun too; workers and
    their loaders, which inherit its id. This module's own are none of them."""
    found: list[Process] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            environment = (place / "environ").read_bytes().split(b"\0")
            status, parent, *_ = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, or is another user's
            continue
        of_run = b"TORCHELASTIC_RUN_ID=" + run_id.encode() in environment
        named = any(_within(word.decode(errors="replace"), run_dir) for word in words)
        if status != "Z" and (of_run or named) and int(place.name) != os.getpid() and OWN not in words:
            ranks = [word.partition(b"=")[2] for word in environment if word.startswith(b"RANK=")]
            rank = int(ranks[0]) if of_run and ranks else None
            command = b" ".join(words).decode(errors="replace").strip()
            found.append(Process(int(place.name), int(parent), command, rank, of_run))
    return found


def _within(word: str, directory: str) -> bool:
    return word == directory or word.startswith(f"{directory}{os.sep}")


def worker_of(processes: list[Process], rank: int) -> Process | None:
    """The process of a rank: the loaders look the same, but for their parent."""
    ours = {process.pid for process in processes if process.of_run}
    return next((one for one in processes if one.rank == rank and one.of_run and one.parent not in ours), None)


def kill_rank(run_dir: str, run_id: str, rank: int) -> int | None:
    """Its process id, or None where it is not on this host."""
    worker = worker_of(processes_of(run_dir, run_id), rank)
    if worker is None:
        return None
    try:
        os.kill(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return worker.pid


def kill_all(run_dir: str, run_id: str) -> int:
    """Whatever belongs to a run here, at once; how many that were."""
    killed: set[int] = set()
    while processes := processes_of(run_dir, run_id):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed.add(process.pid)
    return len(killed)


if __name__ == "__main__":
    directory, run, whom = sys.argv[1:]
    sys.exit(0 if (kill_all(directory, run) if whom == "all" else kill_rank(directory, run, int(whom))) else 1)
