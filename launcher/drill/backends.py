"""Backends of a drill: start, interrupt and resume its runs on this machine or on Slurm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Protocol

from launcher.drill.processes import OWN, in_words, kill_all, kill_rank, processes_of
from launcher.drill.verdict import Kind
from launcher.errors import EXIT_DONE, EXIT_RESUMABLE, SiteError, UserError
from launcher.launch import local
from launcher.launch.slurm import client, submit
from launcher.plan.run_plan import RunPlan
from launcher.process import die_with_parent, wait_until
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import last_lines, read_json
from launcher.runs import control
from launcher.runs.status import ACTIVE, State

_LAUNCH = (sys.executable, "-P", "-m", "launcher", "resume", "--quiet")
# in addition to cluster.grace_s, within which workers end by themselves
_LEAVES_WITHIN_S = 15


class Stage(Protocol):
    """Backend of a drill, which handles one run at a time."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Interruptions that the backend can make."""
        ...

    @property
    def room_s(self) -> float:
        """Seconds of training that must remain after an interruption, so that it does not come too late."""
        ...

    def begin(self, plan: RunPlan, yaml: str) -> None:
        """Make the run's directory and start the run."""
        ...

    def interrupt(self, kind: Kind) -> str:
        """Interrupt the run. Return a description of what was done; empty if no process was left."""
        ...

    def resumes(self, kind: Kind) -> bool:
        """Return True if the run must be resumed by hand after this interruption."""
        ...

    def resume(self) -> None: ...
    def over(self) -> bool: ...

    def complaint(self, kind: Kind | None) -> str:
        """Return what is wrong with the end of a run; empty if nothing. ``kind``: what ended it, None for its end."""
        ...

    def patience_s(self, cold: float) -> float | None:
        """Return the seconds until the next step after an interruption; None: no limit. ``cold``: of a cold start."""
        ...

    def leftovers(self) -> list[str]:
        """Return the processes that a finished run left behind."""
        ...

    def abandon(self) -> None:
        """End the run, whatever it is doing."""
        ...


class Here:
    """Backend for this machine: each start is a `launch resume` process, as a user would type it."""

    kinds = (Kind.preempt, Kind.worker, Kind.tree)
    room_s = 0.5

    def __init__(self) -> None:
        self._launch: subprocess.Popen[bytes] | None = None

    def begin(self, plan: RunPlan, yaml: str) -> None:
        local.create(plan, yaml)
        self.plan = plan
        self.resume()

    def resume(self) -> None:
        with self.plan.paths.launch_log.open("ab") as log:
            self._launch = subprocess.Popen(
                [*_LAUNCH, self.plan.run.dir],
                cwd=self.plan.cluster.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # only the drill handles a Ctrl-C
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    def interrupt(self, kind: Kind) -> str:
        assert self._launch is not None
        plan = self.plan
        if kind is Kind.preempt:
            self._launch.send_signal(signal.SIGUSR2)
            return "SIGUSR2, as of a scheduler"
        if kind is Kind.worker:
            rank = random.randrange(plan.batch.world_size)
            return f"SIGKILL to rank {rank}" if kill_rank(plan.run.dir, plan.run.id, rank) else ""
        count, left = kill_all(plan.run.dir, plan.run.id)
        besides = f"; {in_words(left)}" if left else ""
        return f"SIGKILL to launch, agent and workers ({count} processes{besides})" if count else ""

    def resumes(self, kind: Kind) -> bool:
        return kind is not Kind.worker

    def over(self) -> bool:
        assert self._launch is not None
        return self._launch.poll() is not None

    def complaint(self, kind: Kind | None) -> str:
        assert self._launch is not None
        wanted = {Kind.preempt: EXIT_RESUMABLE, Kind.tree: -signal.SIGKILL}.get(kind, EXIT_DONE) if kind else EXIT_DONE
        status = self._launch.wait()
        if status == wanted:
            return ""
        failure = (read_json(self.plan.paths.summary) or {}).get("failure")
        words = failure["error"] if failure else " ".join(last_lines(self.plan.paths.launch_log, 3))
        return f"`launch` left with status {status} instead of {wanted}: {words}"

    def patience_s(self, cold: float) -> float | None:
        return 120 + 10 * cold

    def leftovers(self) -> list[str]:
        run = self.plan.run
        wait_until(lambda: not processes_of(run.dir, run.id), _LEAVES_WITHIN_S + self.plan.cluster.grace_s)
        left = processes_of(run.dir, run.id)
        return [f"process {process.pid} ({process.command[:100]})" for process in left]

    def abandon(self) -> None:
        if self._launch is not None:
            _, left = kill_all(self.plan.run.dir, self.plan.run.id)
            if left:  # only print: an exception is propagating already and must not be replaced
                print(f"launch drill: {in_words(left)}", file=sys.stderr)
            if self._launch.pid not in [process.pid for process in left]:
                self._launch.wait()


_ASK_EVERY_S = 1.0
_LEAVES_QUEUE_WITHIN_S = 120


class Queued:
    """Backend for Slurm: each run is a job. A run that is not resumed by hand is restarted by Slurm in the same job."""

    kinds = (Kind.preempt, Kind.worker, Kind.tree, Kind.requeue)
    room_s = 4.0  # srun has to get to the node

    def begin(self, plan: RunPlan, yaml: str) -> None:
        self._asked, self._over = 0.0, False
        self._plan, self._job = submit.submit(plan, yaml)

    def resume(self) -> None:
        self._asked, self._over = 0.0, False
        self._job = control.send(control.to_resume(control.one(self._plan.paths)))

    def interrupt(self, kind: Kind) -> str:
        match kind:
            case Kind.preempt:
                client.ask("scancel", "--signal=USR2", self._job)
                return "scancel --signal=USR2"
            case Kind.worker:
                rank = random.randrange(self._plan.batch.world_size)
                node = self._nodes()[rank // self._plan.cluster.workers_per_node]
                return f"SIGKILL to rank {rank} on {node}" if self._kill(str(rank), [node]) else ""
            case Kind.tree:
                nodes = self._nodes()
                return f"SIGKILL to agents and workers on {', '.join(nodes)}" if self._kill("all", nodes) else ""
            case Kind.requeue:
                client.requeue(self._job)
                return "scontrol requeue"

    def _nodes(self) -> list[str]:
        return Fence(self._plan.paths, Incarnation()).newest().get("nodes", [])

    def _kill(self, whom: str, nodes: list[str]) -> bool:
        """Kill processes from a second job step. Return True if there were any.

        scancel cannot do this: it lets the workers save first, whatever signal it is given.
        """
        plan = self._plan
        try:
            client.ask(
                "srun", f"--jobid={self._job}", "--overlap", f"--nodes={len(nodes)}", "--ntasks-per-node=1",
                f"--nodelist={','.join(nodes)}", "--cpus-per-task=1", "--mem=0", "--quiet",
                sys.executable, "-P", "-m", OWN.decode(), plan.run.dir, plan.run.id, whom,
            )  # fmt: skip
        except SiteError as error:
            # if everything is killed, the job may end before this step reports its success
            if not wait_until(self.over, _LEAVES_QUEUE_WITHIN_S if whom == "all" else 0, _ASK_EVERY_S):
                raise SiteError(f"launch drill: nothing can be killed from within the job: {error}") from None
            return whom == "all"
        return True

    def resumes(self, kind: Kind) -> bool:
        return kind is Kind.tree

    def over(self) -> bool:
        if not self._over and time.monotonic() - self._asked >= _ASK_EVERY_S:
            self._asked = time.monotonic()
            self._over = control.one(self._plan.paths).state not in ACTIVE | {State.unknown}
        return self._over

    def complaint(self, kind: Kind | None) -> str:
        run = control.one(self._plan.paths)
        if kind is Kind.tree:  # the kill was intended
            return "" if run.state is not State.done else "it was done before"
        failure = (read_json(self._plan.paths.summary) or {}).get("failure")
        words = failure["error"] if failure else run.detail
        return "" if run.state is State.done else f"job {self._job} is {run.state.value}: {words}"

    def patience_s(self, cold: float) -> float | None:  # noqa: ARG002
        return None

    def leftovers(self) -> list[str]:
        """Wait until Slurm reports that the processes of the job are gone; return the job if it does not."""

        def ended() -> bool:
            job = client.jobs([self._job]).get(self._job)
            return job is None or job.state in client.ENDED

        if wait_until(ended, _LEAVES_QUEUE_WITHIN_S, _ASK_EVERY_S):
            return []
        return [f"Slurm still lists job {self._job} {_LEAVES_QUEUE_WITHIN_S} s after its end"]

    def abandon(self) -> None:
        run = control.one(self._plan.paths)
        if run.state in ACTIVE:
            try:
                control.cancel([run], lambda _: None)
            except UserError:  # it is over, or Slurm does not answer; the propagating exception names the job
                client.ask("scancel", self._job, check=False)
