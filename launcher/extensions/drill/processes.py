"""Processes of a run on this host, found by the run's id in their environment.

    python -m launcher.extensions.drill.processes RUN_ID RANK|all

sends SIGKILL to one rank, or to all processes of the run. A drill runs this on the nodes of a Slurm job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from launcher.process import AGENT_PID, RUN_ID, wait_until

_POLL_S = 0.02
# seconds; a process that is blocked in the kernel, as on a dead network disk, may never end
_DIES_WITHIN_S = 20.0


def workers_of(run_id: str) -> dict[int, psutil.Process]:
    """Return a run's workers on this host, by rank: processes whose parent is the agent named in AGENT_PID."""
    workers: dict[int, psutil.Process] = {}
    for process, environment in _of_run(run_id):
        with suppress(psutil.Error):  # it has ended
            if "RANK" in environment and environment.get(AGENT_PID) == str(process.ppid()):
                workers[int(environment["RANK"])] = process
    return workers


def processes_of(run_id: str) -> list[psutil.Process]:
    """Return the processes of a run on this host: agent, mirror, workers, their children, and orphans of these.

    They inherit the run's id in RUN_ID. `launch` has it only if a drill started it.
    """
    return [process for process, _ in _of_run(run_id)]


def _of_run(run_id: str) -> list[tuple[psutil.Process, dict[str, str]]]:
    """Return this user's living processes that have the run's id in their environment, and these environments."""
    processes: list[tuple[psutil.Process, dict[str, str]]] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            environment = process.environ()
            if environment.get(RUN_ID) == run_id and process.status() != psutil.STATUS_ZOMBIE:
                processes.append((process, environment))
    return processes


def kill_rank(run_id: str, rank: int) -> bool:
    """Kill the worker of a rank. Return False if it is not on this host."""
    worker = workers_of(run_id).get(rank)
    if worker is None:
        return False
    with suppress(psutil.Error):
        worker.kill()
    return True


def kill_all(run_id: str, within_s: float = _DIES_WITHIN_S) -> tuple[int, list[psutil.Process]]:
    """Kill all processes of a run on this host; see ``processes_of``.

    Returns:
        The number of processes killed, and those that are still alive after ``within_s`` seconds.
    """
    killed: set[psutil.Process] = set()

    def none_left() -> bool:
        left = processes_of(run_id)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
                killed.add(process)
        return not left

    left = [] if wait_until(none_left, within_s, _POLL_S) else processes_of(run_id)
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
