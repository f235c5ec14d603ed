"""Where the runs of a drill take place: begun, interrupted, let go on. This machine's; Slurm's is in ``queued``."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Protocol

from launcher.cluster import local
from launcher.drill.processes import in_words, kill_all, kill_rank, processes_of
from launcher.drill.verdict import Kind
from launcher.errors import EXIT_DONE, EXIT_RESUMABLE
from launcher.paths import read_json
from launcher.plan import RunPlan
from launcher.process import die_with_parent
from launcher.tail import last_lines

_LAUNCH = (sys.executable, "-P", "-m", "launcher", "resume", "--quiet")
# beside cluster.grace_s, which a worker has to end by itself
_LEAVES_WITHIN_S = 15


class Stage(Protocol):
    """One run at a time. ``room_s``: seconds of training that must lie between an interruption and the end, so that it
    does not come too late. ``patience_s``: that a run which died may take until its next step, None: as long as the
    queue takes; cold: seconds of a cold start."""

    @property
    def kinds(self) -> tuple[Kind, ...]: ...
    @property
    def room_s(self) -> float: ...

    def begin(self, plan: RunPlan, yaml: str) -> None:
        """Make the run's directory, and start it."""
        ...

    def interrupt(self, kind: Kind) -> str:
        """Do it; to whom, in words. Empty where there was nobody any more."""
        ...

    def resumes(self, kind: Kind) -> bool:
        """Whether the run has to be resumed by hand afterwards."""
        ...

    def resume(self) -> None: ...
    def over(self) -> bool: ...

    def complaint(self, kind: Kind | None) -> str:
        """Of a run that is over: what is wrong with its end, None being its last one; empty where nothing."""
        ...

    def patience_s(self, cold: float) -> float | None: ...

    def leftovers(self) -> list[str]:
        """Processes of a run that is over."""
        ...

    def abandon(self) -> None:
        """End it, whatever it is doing."""
        ...


class Here:
    """On this machine each start is a `launch resume` of its own, as a person would type it: it can be killed."""

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
                start_new_session=True,  # a Ctrl-C is the drill's
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
        end = time.monotonic() + _LEAVES_WITHIN_S + self.plan.cluster.grace_s
        while (left := processes_of(self.plan.run.dir, self.plan.run.id)) and time.monotonic() < end:
            time.sleep(local.POLL_S)
        return [f"process {process.pid} ({process.command[:100]})" for process in left]

    def abandon(self) -> None:
        if self._launch is not None:
            _, left = kill_all(self.plan.run.dir, self.plan.run.id)
            if left:  # there is an error on its way already, which is not to be lost
                print(f"launch drill: {in_words(left)}", file=sys.stderr)
            if self._launch.pid not in [process.pid for process in left]:
                self._launch.wait()
