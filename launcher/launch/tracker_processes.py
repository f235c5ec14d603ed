"""Processes of the trackers: node 0's agent starts one for each, starts it again if it was killed, and ends it.

A tracker's process reads the run's record (launcher/report/trackers.py). It can neither slow nor stop the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from launcher.config.schema import Tracker
from launcher.errors import UserError
from launcher.plan.host import TRACKER_ENV, allowed_env
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.plan.tracker_plan import TRACKER_KINDS, mirrors_of
from launcher.process import RUN_ID
from launcher.rundir.fencing import Attempt
from launcher.rundir.files import read_json, write_json

# seconds; the record is on disk, so what is not delivered in this time can be delivered later
GRACE_S, HURRIED_S = 60, 5
_CHECK_EVERY_S = 1.0


class TrackerProcesses(threading.Thread):
    """Thread that keeps the trackers' processes running, from ``start`` to ``finish``; none on nodes other than 0.

    The processes inherit the creator's blocked stop signals and keep them blocked: each ends when its standard input
    closes, which also happens if this process is killed. They get the environment that this process has now.
    """

    def __init__(self, plan: LaunchPlan, own: Attempt) -> None:
        super().__init__(daemon=True)
        self._plan, self._own = plan, own
        self._env = dict(os.environ)
        self._processes: dict[Tracker, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()

    def start(self) -> None:
        if self._plan.node == 0:
            self.keep_running()
            super().start()

    def run(self) -> None:
        while not self._over.wait(_CHECK_EVERY_S):
            self.keep_running()

    def keep_running(self) -> None:
        """Start each tracker that is not running yet, or was killed. One that ended by itself stays ended."""
        for tracker in self._trackers():
            process = self._processes.get(tracker)
            if process is None or (process.poll() or 0) < 0:
                if process is not None and process.stdin is not None:
                    process.stdin.close()
                try:
                    self._processes[tracker] = self._start(tracker)
                except OSError as error:  # a full disk, or no memory for a process: the job does not depend on it
                    print(f"The process of {tracker.value} did not start: {error}", flush=True)

    def _trackers(self) -> tuple[Tracker, ...]:
        """Return the trackers of the record's plan, which a script of `launch run` may make later, or never."""
        if isinstance(self._plan, RunPlan):
            return mirrors_of(self._plan)
        try:
            recorded = RunPlan.of_record(self._plan.paths)
        except (OSError, UserError):
            return ()
        return () if recorded is None else mirrors_of(recorded)

    def _start(self, tracker: Tracker) -> subprocess.Popen[bytes]:
        plan = self._plan
        with plan.paths.tracker_log(tracker).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.report.trackers", plan.run.dir, str(self._own), tracker.value],
                env=allowed_env(self._env, (*plan.env.allow, *TRACKER_ENV[tracker])) | {RUN_ID: plan.run.id},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C must not reach it
            )

    def finish(self, within_s: float) -> None:
        """Let the trackers deliver the rest for at most ``within_s`` seconds in all, then kill them."""
        if self._plan.node != 0:
            return
        self._over.set()
        self.join()
        self.keep_running()  # one that was killed, or whose plan was made since the last check
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + within_s
        for tracker, process in self._processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._report(tracker, within_s)

    def _report(self, tracker: Tracker, within_s: float) -> None:
        path = self._plan.paths.tracker_status(tracker)
        again = resend_command(self._plan, tracker)
        problem = f"{TRACKER_KINDS[tracker].title} had not taken everything {within_s} s after the end; `{again}` "
        write_json(path, (read_json(path) or {}) | {"problem": f"{problem}sends the rest."})


def resend_command(plan: LaunchPlan, tracker: Tracker) -> str:
    """Return the command that delivers to a tracker what it lacks of a run that has ended."""
    if tracker is Tracker.wandb:
        return "wandb sync"
    return f"python -m launcher.report.trackers {plan.run.dir} newest {tracker.value} </dev/null"
