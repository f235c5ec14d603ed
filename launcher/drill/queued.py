"""The runs of a drill as jobs of Slurm's, interrupted by what a user, a scheduler or a bad node can do to them."""

from __future__ import annotations

import random
import sys
import time

from launcher.cluster import control
from launcher.cluster.slurm import client, submit
from launcher.drill.processes import OWN
from launcher.drill.verdict import Kind
from launcher.errors import SiteError, UserError
from launcher.incarnation import Fence, Incarnation
from launcher.paths import read_json
from launcher.plan import RunPlan
from launcher.runstate import ACTIVE, State

_ASK_EVERY_S = 1.0
_LEAVES_WITHIN_S = 120


class Queued:
    """Each run is a job. What is not resumed by hand Slurm begins again by itself, in the same job."""

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
        """Whether there was somebody. By a step of the user's own, beside that of the job: scancel lets the workers
        save first, whatever signal it is told."""
        plan = self._plan
        try:
            client.ask(
                "srun", f"--jobid={self._job}", "--overlap", f"--nodes={len(nodes)}", "--ntasks-per-node=1",
                f"--nodelist={','.join(nodes)}", "--cpus-per-task=1", "--mem=0", "--quiet",
                sys.executable, "-P", "-m", OWN.decode(), plan.run.dir, plan.run.id, whom,
            )  # fmt: skip
        except SiteError as error:
            # where all is killed, the job may end before this step has said so
            end = time.monotonic() + (_LEAVES_WITHIN_S if whom == "all" else 0)
            while not self.over():
                if time.monotonic() > end:
                    raise SiteError(f"launch drill: nothing can be killed from within the job: {error}") from None
                time.sleep(_ASK_EVERY_S)
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
        if kind is Kind.tree:  # killed as it was meant to be
            return "" if run.state is not State.done else "it was done before"
        failure = (read_json(self._plan.paths.summary) or {}).get("failure")
        words = failure["error"] if failure else run.detail
        return "" if run.state is State.done else f"job {self._job} is {run.state.value}: {words}"

    def patience_s(self, cold: float) -> float | None:  # noqa: ARG002
        return None

    def leftovers(self) -> list[str]:
        """Slurm itself says when the processes of a job are gone."""
        end = time.monotonic() + _LEAVES_WITHIN_S
        while (listed := client.jobs([self._job]).get(self._job)) and listed.state not in client.ENDED:
            if time.monotonic() > end:
                return [f"Slurm job {self._job} is {listed.state}"]
            time.sleep(_ASK_EVERY_S)
        return []

    def abandon(self) -> None:
        run = control.one(self._plan.paths)
        if run.state in ACTIVE:
            try:
                control.cancel([run], lambda _: None)
            except UserError:  # it is over by now, or Slurm does not answer: the job is named in what is raised anyway
                client.ask("scancel", self._job, check=False)
