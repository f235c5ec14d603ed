"""Backends of a drill: start, interrupt and resume its runs on this machine or on Slurm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

from launcher.errors import EXIT_DONE, EXIT_RESUMABLE, SiteError, UserError
from launcher.extensions.drill.processes import describe, describe_survivors, kill_all, kill_rank, processes_of
from launcher.extensions.drill.verdict import Interruption
from launcher.launch import local
from launcher.launch.slurm import client, submit
from launcher.plan.run_plan import RunPlan
from launcher.process import RUN_ID, die_with_parent, wait_until
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import last_lines, read_json
from launcher.rundir.paths import RunPaths
from launcher.runs import control
from launcher.runs.status import ACTIVE, RunState


def _failure(paths: RunPaths, otherwise: str) -> str:
    """Return the error in the run's summary; ``otherwise`` if there is none."""
    failure = (read_json(paths.summary) or {}).get("failure")
    return failure["error"] if failure else otherwise


_RESUME = (sys.executable, "-P", "-m", "launcher", "resume", "--quiet")
# in addition to cluster.grace_s, within which workers end by themselves
_LEAVES_WITHIN_S = 15


class LocalBackend:
    """Backend for this machine, which handles one run at a time: each start is a `launch resume` process, as a user
    would type it.

    Attributes:
        kinds: interruptions that the backend can make.
        resumed_by_hand: those after which the run must be resumed by `launch resume`.
        least_remaining_s: seconds of training that must remain after an interruption, so that it is not too late.
        queues: a run may wait in a queue, so there is no limit on the time until its next step.
    """

    kinds: tuple[Interruption, ...] = (Interruption.preempt, Interruption.worker, Interruption.tree)
    resumed_by_hand: tuple[Interruption, ...] = (Interruption.preempt, Interruption.tree)
    least_remaining_s = 0.5
    queues = False

    def start(self, plan: RunPlan, yaml: str) -> None:
        """Make the run's directory and start the run. ``yaml``: text of its config.yaml."""
        local.create(plan, yaml)
        self.plan = plan
        self.resume()

    def resume(self) -> None:
        with self.plan.paths.launch_log.open("ab") as log:
            self._launch = subprocess.Popen(
                [*_RESUME, self.plan.run.dir],
                env=os.environ | {RUN_ID: self.plan.run.id},
                cwd=self.plan.cluster.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # only the drill handles a Ctrl-C
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    def interrupt(self, kind: Interruption) -> str:
        """Interrupt the run. Return a description of what was done; empty if no process was left."""
        plan = self.plan
        if kind is Interruption.preempt:
            self._launch.send_signal(signal.SIGUSR2)
            return "SIGUSR2, as of a scheduler"
        if kind is Interruption.worker:
            rank = random.randrange(plan.batch.world_size)
            return f"SIGKILL to rank {rank}" if kill_rank(plan.run.id, rank) else ""
        killed, left = kill_all(plan.run.id)
        survivors = f"; {describe_survivors(left)}" if left else ""
        return f"SIGKILL to launch, agent and workers ({killed} processes{survivors})" if killed else ""

    def ended(self) -> bool:
        return self._launch.poll() is not None

    def problem(self, kind: Interruption | None) -> str:
        """Return what is wrong with the end of a run that ``kind``, or None, interrupted; empty if nothing is."""
        expected = EXIT_DONE
        if kind is not None:
            expected = {Interruption.preempt: EXIT_RESUMABLE, Interruption.tree: -signal.SIGKILL}.get(kind, EXIT_DONE)
        status = self._launch.wait()
        if status == expected:
            return ""
        error = _failure(self.plan.paths, " ".join(last_lines(self.plan.paths.launch_log, 3)))
        return f"`launch` left with status {status} instead of {expected}: {error}"

    def leftovers(self) -> list[str]:
        """Return the processes that a finished run left behind, after some time in which they may end."""
        wait_until(lambda: not processes_of(self.plan.run.id), _LEAVES_WITHIN_S + self.plan.cluster.grace_s)
        return [describe(process) for process in processes_of(self.plan.run.id)]

    def abandon(self) -> None:
        """End the run in any state."""
        _, left = kill_all(self.plan.run.id)
        if left:  # only print: an exception is propagating already and must not be replaced
            print(f"launch drill: {describe_survivors(left)}", file=sys.stderr)
        if self._launch.pid not in [process.pid for process in left]:
            self._launch.wait()


_ASK_EVERY_S = 1.0
_LEAVES_QUEUE_WITHIN_S = 120


class SlurmBackend:
    """Backend for Slurm: each run is a job. A run that needs no resume is restarted by Slurm in the same job."""

    kinds: tuple[Interruption, ...] = tuple(Interruption)
    resumed_by_hand: tuple[Interruption, ...] = (Interruption.tree,)
    least_remaining_s = 4.0  # srun has to get to the node
    queues = True

    def start(self, plan: RunPlan, yaml: str) -> None:
        self._asked_at, self._ended = 0.0, False
        self._plan, self._job = submit.submit_job(plan, yaml)

    def resume(self) -> None:
        self._asked_at, self._ended = 0.0, False
        self._job = control.resubmit(control.to_resume(control.status_of(self._plan.paths)))

    def interrupt(self, kind: Interruption) -> str:
        match kind:
            case Interruption.preempt:
                client.ask("scancel", "--signal=USR2", self._job)
                return "scancel --signal=USR2"
            case Interruption.worker:
                rank = random.randrange(self._plan.batch.world_size)
                node = self._nodes()[rank // self._plan.cluster.workers_per_node]
                return f"SIGKILL to rank {rank} on {node}" if self._kill(str(rank), [node]) else ""
            case Interruption.tree:
                nodes = self._nodes()
                return f"SIGKILL to agents and workers on {', '.join(nodes)}" if self._kill("all", nodes) else ""
            case Interruption.requeue:
                client.requeue(self._job)
                return "scontrol requeue"

    def _nodes(self) -> list[str]:
        return Fence(self._plan.paths, Incarnation()).newest().get("nodes", [])

    def _kill(self, target: str, nodes: list[str]) -> bool:
        """Kill processes from a second job step. Return True if there were any. ``target``: a rank, or "all".

        scancel cannot do this: it lets the workers save first, whatever signal it is given.
        """
        try:
            client.ask(
                "srun", f"--jobid={self._job}", "--overlap", f"--nodes={len(nodes)}", "--ntasks-per-node=1",
                f"--nodelist={','.join(nodes)}", "--cpus-per-task=1", "--mem=0", "--quiet",
                sys.executable, "-P", "-m", "launcher.extensions.drill.processes", self._plan.run.id, target,
            )  # fmt: skip
        except SiteError as error:
            # if everything is killed, the job may end before this step reports its success
            if not wait_until(self.ended, _LEAVES_QUEUE_WITHIN_S if target == "all" else 0, _ASK_EVERY_S):
                raise SiteError(f"launch drill: nothing can be killed from within the job: {error}") from None
            return target == "all"
        return True

    def ended(self) -> bool:
        if not self._ended and time.monotonic() - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            self._ended = control.status_of(self._plan.paths).state not in ACTIVE | {RunState.unknown}
        return self._ended

    def problem(self, kind: Interruption | None) -> str:
        run = control.status_of(self._plan.paths)
        if kind is Interruption.tree:  # the kill was intended
            return "" if run.state is not RunState.done else "it was done before"
        if run.state is RunState.done:
            return ""
        return f"job {self._job} is {run.state.value}: {_failure(self._plan.paths, run.detail)}"

    def leftovers(self) -> list[str]:
        """Wait until Slurm reports that the processes of the job are gone; return the job if it does not."""

        def ended() -> bool:
            job = client.jobs([self._job]).get(self._job)
            return job is None or job.state in client.ENDED

        if wait_until(ended, _LEAVES_QUEUE_WITHIN_S, _ASK_EVERY_S):
            return []
        return [f"Slurm still lists job {self._job} {_LEAVES_QUEUE_WITHIN_S} s after its end"]

    def abandon(self) -> None:
        run = control.status_of(self._plan.paths)
        if run.state in ACTIVE:
            try:
                control.cancel_runs([run], lambda _: None)
            except UserError:  # it is over, or Slurm does not answer; the propagating exception names the job
                client.ask("scancel", self._job, check=False)


Backend = LocalBackend | SlurmBackend
