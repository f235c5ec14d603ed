"""Processes of a run on this host, found by what they inherit and by who started them.

    python -m launcher.drill.processes RUN_ID RANK|all

sends SIGKILL to one rank, or to the agent and everything below it. A drill runs this on the nodes of a Slurm job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.process import AGENT_PID, children, state_of

_POLL_S = 0.02
# seconds; a process that is blocked in the kernel, as on a dead network disk, may never end
_DIES_WITHIN_S = 20.0


@dataclass(frozen=True)
class Process:
    """Process of a run. ``role``: "launch", "agent", "rank N", or "child" of one of these."""

    pid: int
    role: str
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:100]})"


def processes_of(run_id: str, launch: int | None = None) -> list[Process]:
    """Return the processes of a run on this host.

    Workers and their children inherit torchrun's id of the run, and workers the process id of their agent.

    Args:
        launch: process id of the `launch` command that runs the job here; None without one.

    Returns:
        ``launch``, the agent, the workers, and all descendants of these.
    """
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    inherited = {pid: env for pid in pids if (env := _environment(pid)).get("TORCHELASTIC_RUN_ID") == run_id}
    roles = dict.fromkeys(inherited, "child") | ({launch: "launch"} if launch is not None else {})
    for agent in {int(env[AGENT_PID]) for env in inherited.values() if AGENT_PID in env}:
        # another process may have got the id of an agent that is gone, but it has not started these workers
        if workers := inherited.keys() & children(agent):
            roles |= {agent: "agent"} | {pid: f"rank {inherited[pid]['RANK']}" for pid in workers}
    found: dict[int, Process] = {}
    pending = list(roles)
    while pending:
        pid = pending.pop()
        if pid not in found and state_of(pid) not in (None, "Z"):
            found[pid] = Process(pid, roles.get(pid, "child"), _command(pid))
            pending += children(pid)
    return list(found.values())


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it ended or belongs to another user."""
    entries = _read(Path(f"/proc/{pid}/environ")).split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def kill_rank(run_id: str, rank: int) -> bool:
    """Kill the worker of a rank. Return False if it is not on this host."""
    for process in processes_of(run_id):
        if process.role == f"rank {rank}":
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                return True
    return False


def kill_all(run_id: str, launch: int | None = None, within_s: float = _DIES_WITHIN_S) -> tuple[int, list[Process]]:
    """Kill all processes of a run on this host; see ``processes_of``.

    Returns:
        The number of processes killed, and those that are still alive after ``within_s`` seconds.
    """
    killed: set[int] = set()
    end = time.monotonic() + within_s
    while (left := processes_of(run_id, launch)) and time.monotonic() < end:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
                killed.add(process.pid)
        time.sleep(_POLL_S)
    return len(killed), left


def describe_survivors(left: list[Process]) -> str:
    """Return a description of the processes that SIGKILL did not end; empty if it ended all."""
    return f"still there after SIGKILL: {', '.join(map(str, left))}" if left else ""


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
