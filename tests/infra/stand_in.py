"""Jobs whose ranks are stand-ins: everything up to the start of the workers is real, and no worker starts.

``main`` is `launch` with another last step. Plan, batch script, sbatch, the tasks on the nodes, the attempt, the store
of all agents, torch's assignment of ranks, hang watch, verdict: those of `launch train`. In place of the workers, each
node writes a ``Meeting``, and leaves once the agent of node 0 has heard from all agents.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.launch import agent
from launcher.launch.slurm import node
from launcher.launch.watchdog import HangWatch
from launcher.rundir.files import write_json, write_text
from launcher.rundir.paths import RunPaths
from tests.infra.slurm import Cluster


@dataclass(kw_only=True)
class Meeting:
    """Record of one node's agent.

    ``ranks``, ``world``, ``master``: in the environment of its workers. By the machine's clock: ``started``, the task;
    ``arrived``, the agent at the rendezvous; ``met``, the workers would start; ``heard``, node 0 has a report of every
    agent. ``cpu_s``: CPU time of the agent from ``arrived`` to ``met``. ``read_s``: on node 0, to read all reports.
    """

    node: int
    host: str
    ranks: list[int]
    world: list[int]
    master: str
    started: float
    arrived: float
    met: float
    cpu_s: float
    heard: float = 0.0
    read_s: float = 0.0

    @classmethod
    def of(cls, run_dir: Path) -> list[Self]:
        """Return those of all nodes, by node."""
        records = (cls(**json.loads(file.read_text())) for file in run_dir.glob("meeting*.json"))
        return sorted(records, key=lambda record: record.node)


class _Workers:
    """Stand-in for torch's context of a node's workers."""

    def __init__(self, call: dict[str, Any], task: _Task) -> None:
        met, cpu_s = time.time(), time.process_time() - task.cpu_s
        call["logs_specs"].reify(call["envs"])  # names the logs, and starts the watch for hangs
        envs = [env for _, env in sorted(call["envs"].items())]
        self._local, self._task = len(envs), task
        self._meeting = Meeting(
            node=int(task.env["SLURM_NODEID"]),
            host=task.env["SLURMD_NODENAME"],
            ranks=[int(env["RANK"]) for env in envs],
            world=sorted({int(env["WORLD_SIZE"]) for env in envs}),
            master=" ".join({f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" for env in envs}),
            started=task.started,
            arrived=task.arrived,
            met=met,
            cpu_s=cpu_s,
        )

    def pids(self) -> dict[int, int]:
        return dict.fromkeys(range(self._local), os.getpid())

    def wait(self, timeout: float) -> Any:  # noqa: ARG002
        """Return torch's result once this node may leave, else None."""
        from torch.distributed.elastic.multiprocessing.api import RunProcsResult

        if not self._may_leave():
            return None
        write_json(self._task.paths.root / f"meeting{self._meeting.node}.json", dataclasses.asdict(self._meeting))
        return RunProcsResult(return_values=dict.fromkeys(range(self._local)))

    def _may_leave(self) -> bool:
        watch, start = self._task.watch, self._task.watch._current
        if self._meeting.node:
            return start is not None and start.checks > 0  # it has posted
        assert start is not None
        others = [start.key("states", number) for number in range(1, watch._plan.cluster.nodes)]
        began = time.perf_counter()
        if len(watch._store.read(others)) < len(others):
            return False
        self._meeting.read_s, self._meeting.heard = time.perf_counter() - began, time.time()
        write_text(self._task.paths.summary, '{"verdict": "done"}\n')
        return True

    def close(self, *arguments: Any, **named: Any) -> None: ...


class _Task:
    """The task of one node, in whose process torch starts no workers."""

    watch: HangWatch

    def __init__(self, run_dir: str) -> None:
        from torch.distributed.elastic.agent.server import local_elastic_agent

        self.paths, self.env = RunPaths(Path(run_dir)), dict(os.environ)  # the agent's is that of the workers
        self.started, self.arrived, self.cpu_s = time.time(), 0.0, 0.0
        agent.POLL_S = 5.0  # 512 threads that look fifty times a second for dead workers are too many for one machine
        make_watch, register = agent._watch, agent.rendezvous.register

        def remember(*arguments: Any) -> Any:
            watch = make_watch(*arguments)
            assert isinstance(watch, HangWatch)
            self.watch = watch
            return watch

        def arrive(*arguments: Any) -> None:
            self.arrived, self.cpu_s = time.time(), time.process_time()
            register(*arguments)

        agent._watch, agent.rendezvous.register = remember, arrive
        local_elastic_agent.start_processes = lambda **call: _Workers(call, self)  # pyright: ignore


_run_node = node.run_node


def run_node(run_dir: str, submission: int) -> None:
    """Run the task of one node, as ``node.run_node`` does."""
    _Task(run_dir)
    _run_node(run_dir, submission)


# of a login shell on most systems; Slurm gives a job's processes the limits of the shell that submitted it
_OPEN_FILES = 1024


def submit(there: Cluster, directory: Path, nodes: int, *overrides: str) -> Path:
    """Submit a job of so many nodes, 8 workers each, from ``directory`` and wait for its end. Return its run."""
    job = (
        "cluster=slurm", f"cluster.nodes={nodes}", "cluster.workers_per_node=8", "cluster.device=cpu", "cluster.mem=0",
        f"batch.global_size={8 * nodes}", "batch.micro_size=1", "run.name=meet", "trackers=[]", *overrides,
    )  # fmt: skip
    program = "from tests.infra.stand_in import main; main()"
    shell = f'ulimit -Sn {_OPEN_FILES} && exec "$0" "$@"'
    there.login(
        "sh", "-c", shell, there.python, "-P", "-c", program, "train", *job, "--wait", cwd=directory, timeout=1800
    )
    return directory / "runs/meet"


def main() -> None:
    """Run `launch`; the tasks of what it submits have stand-ins for ranks."""
    from launcher.cli import main as launch

    node.__name__ = __name__  # the module that the tasks run
    launch()


if __name__ == "__main__":  # a task
    node.run_node = run_node  # pyright: ignore[reportAttributeAccessIssue]
    node.main(*sys.argv[1:])
