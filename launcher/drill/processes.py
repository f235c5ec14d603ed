"""Processes of a run on this host, found by what they inherit and by who started them.

    python -m launcher.drill.processes RUN_ID RANK|all

sends SIGKILL to one rank, or to the agent and everything below it. A drill runs this on the nodes of a Slurm job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from launcher.process import AGENT_PID, wait_until

_POLL_S = 0.02
# seconds; a process that is blocked in the kernel, as on a dead network disk, may never end
_DIES_WITHIN_S = 20.0


def workers_of(run_id: str) -> dict[int, psutil.Process]:
    """Return the workers of a run on this host by rank: the children of the agent that they name in AGENT_PID."""
    return {
        int(environment["RANK"]): process
        for process, environment in _inheriting(run_id)
        if _parent(process) == int(environment.get(AGENT_PID, "0"))
    }


def processes_of(run_id: str, launch: int | None = None) -> list[psutil.Process]:
    """Return the processes of a run on this host: ``launch``, the agent, all their descendants, and orphans of these.

    Workers and their children inherit torchrun's id of the run, by which they are found when their parent is gone.

    Args:
        launch: process id of the `launch` command that runs the job here; None without one.
    """
    processes = {process for process, _ in _inheriting(run_id)}
    for pid in {launch, *map(_parent, workers_of(run_id).values())} - {None}:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            processes |= {root, *root.children(recursive=True)}
    return sorted(filter(_is_alive, processes), key=lambda process: process.pid)


def _inheriting(run_id: str) -> list[tuple[psutil.Process, dict[str, str]]]:
    inheriting: list[tuple[psutil.Process, dict[str, str]]] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            environment = process.environ()
            if environment.get("TORCHELASTIC_RUN_ID") == run_id and _is_alive(process):
                inheriting.append((process, environment))
    return inheriting


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_rank(run_id: str, rank: int) -> bool:
    """Kill the worker of a rank. Return False if it is not on this host."""
    worker = workers_of(run_id).get(rank)
    if worker is None:
        return False
    with suppress(psutil.NoSuchProcess):
        worker.kill()
    return True


def kill_all(
    run_id: str, launch: int | None = None, within_s: float = _DIES_WITHIN_S
) -> tuple[int, list[psutil.Process]]:
    """Kill all processes of a run on this host; see ``processes_of``.

    Returns:
        The number of processes killed, and those that are still alive after ``within_s`` seconds.
    """
    killed: set[psutil.Process] = set()

    def none_left() -> bool:
        left = processes_of(run_id, launch)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                killed.add(process)
        return not left

    left = [] if wait_until(none_left, within_s, _POLL_S) else processes_of(run_id, launch)
    return len(killed), left


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:100]})"
    except psutil.Error:
        return f"process {process.pid}"


def describe_survivors(left: Sequence[psutil.Process]) -> str:
    """Return a description of the processes that SIGKILL did not end; empty if it ended all."""
    return f"still there after SIGKILL: {', '.join(map(describe, left))}" if left else ""


def main(run_id: str, target: str) -> int:
    """Kill one rank or all. Return 0 if there was something to kill and it is gone, else 1."""
    if target != "all":
        return 0 if kill_rank(run_id, int(target)) else 1
    killed, left = kill_all(run_id)
    if left:
        print(describe_survivors(left), file=sys.stderr)
    return 0 if killed and not left else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
