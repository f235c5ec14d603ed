"""Processes of the trackers: node 0's agent starts one for each, starts it again if it was killed, and ends it.

A tracker's process reads the run's record (launcher/trackers/mirror.py). It can neither slow nor stop the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.errors import EXIT_DONE, Superseded, UserError
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import AGENT_PID, RUN_ID, inherited_environment
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_json, write_json, write_line
from launcher.rundir.paths import RunPaths
from launcher.trackers.installed import described_tracker, mirrors_of

# seconds; the record is on disk, so what is not delivered in this time can be delivered later
GRACE_S, HURRIED_S = 60, 5
# pauses before a process that was killed is started again, seconds; then it is given up
RESTART_PAUSES_S = (1, 10, 60)
WORKED_S = 300  # a process that ran so long, in seconds, starts counting its deaths again
_CHECK_EVERY_S = 1.0


@dataclass
class _Kept:
    """Process of one tracker, and how it fared.

    Attributes:
        started, due: times of the monotonic clock: last start, earliest next start.
        deaths: starts in succession that ended by a signal.
    """

    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    due: float = 0.0
    deaths: int = 0
    given_up: bool = False

    @property
    def died(self) -> bool:
        return self.process is not None and (self.process.poll() or 0) < 0


class TrackerProcesses(threading.Thread):
    """Thread that keeps the trackers' processes running, from ``start`` to ``finish``; none on nodes other than 0.

    The processes inherit the creator's blocked stop signals and keep them blocked: each ends when its standard input
    closes, which also happens if this process is killed. They get the environment that this process has now.

    Args:
        of_agent: this process is the agent, and the parent of the workers.
    """

    def __init__(self, plan: LaunchPlan, own: Incarnation, *, of_agent: bool = False) -> None:
        super().__init__(daemon=True)
        self._plan, self._own = plan, own
        self._env = inherited_environment(os.environ) | ({AGENT_PID: str(os.getpid())} if of_agent else {})
        self._kept: dict[str, _Kept] = {}
        self._over = threading.Event()

    def start(self) -> None:
        if self._plan.node == 0:
            self.keep_running()
            super().start()

    def run(self) -> None:
        while not self._over.wait(_CHECK_EVERY_S):
            self.keep_running()

    def keep_running(self, *, at_once: bool = False) -> None:
        """Start each tracker that is not running yet, or was killed. One that ended by itself stays ended.

        Args:
            at_once: leave out the pauses between two starts.
        """
        for tracker in _mirrors(self._plan):
            kept = self._kept.setdefault(tracker, _Kept())
            if kept.died:
                self._note_death(tracker, kept)
            if kept.process is None and not kept.given_up and (at_once or time.monotonic() >= kept.due):
                try:
                    kept.process = self._start(tracker)
                    kept.started = time.monotonic()
                except OSError as error:  # no memory for a process: the job does not depend on it
                    kept.due = time.monotonic() + RESTART_PAUSES_S[-1]
                    write_line(f"The process of {tracker} did not start: {error}")

    def _note_death(self, tracker: str, kept: _Kept) -> None:
        assert kept.process is not None
        assert kept.process.stdin is not None
        kept.process.stdin.close()
        number, now = -kept.process.returncode, time.monotonic()
        kept.process = None
        if now - kept.started >= WORKED_S:
            kept.deaths = 0
        if kept.deaths == len(RESTART_PAUSES_S):
            kept.given_up = True
            title = described_tracker(tracker).title
            problem = (
                f"The process of {title} was killed {kept.deaths + 1} times in succession, last by signal {number}"
            )
            log = self._plan.paths.tracker_log(tracker)
            self._set_problem(tracker, f"{problem}, and is not started again; see {log}. {rest_text(self._plan.paths)}")
        else:
            kept.due = now + RESTART_PAUSES_S[kept.deaths]
            kept.deaths += 1

    def _start(self, tracker: str) -> subprocess.Popen[bytes]:
        plan = self._plan
        with self._log(tracker) as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.trackers.mirror", plan.run.dir, str(self._own), tracker],
                env=self._env | {RUN_ID: plan.run.id},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C must not reach it
            )

    def _log(self, tracker: str) -> BinaryIO:
        try:
            return self._plan.paths.tracker_log(tracker).open("ab")
        except OSError:  # a full disk has no place for a log; the tracker's server may be elsewhere
            return Path(os.devnull).open("ab")

    def finish(self, within_s: float) -> set[str]:
        """Let the trackers deliver the rest for at most ``within_s`` seconds in all, then kill them.

        Returns:
            The trackers whose processes ended without an error.
        """
        if self._plan.node != 0:
            return set()
        self._over.set()
        self.join()
        self.keep_running(at_once=True)  # one that was killed, or whose plan was made since the last check
        processes = {tracker: kept.process for tracker, kept in self._kept.items() if kept.process is not None}
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + within_s
        running = [described_tracker(tracker).title for tracker, process in processes.items() if process.poll() is None]
        if running:
            write_line(f"Waiting up to {within_s} s for {', '.join(running)} to take the rest of the record.")
        for tracker, process in processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                title = described_tracker(tracker).title
                problem = f"{title} had not taken everything {within_s} s after the end. {rest_text(self._plan.paths)}"
                self._set_problem(tracker, problem)
        return {tracker for tracker, process in processes.items() if process.returncode == EXIT_DONE}

    def _set_problem(self, tracker: str, problem: str) -> None:
        path = self._plan.paths.tracker_status(tracker)
        try:
            Fence(self._plan.paths, self._own).check()
            write_json(path, (read_json(path) or {}) | {"problem": problem})
        except (OSError, ValueError, Superseded) as error:
            write_line(f"{problem} The status cannot be written: {error}")


_REST = "After the end of the run, `launch mirror"


def rest_text(paths: RunPaths) -> str:
    """Return a sentence on how a tracker gets what it lacks of a run that has ended."""
    return f"{_REST} {paths.root}` sends the rest."


def without_rest(problem: str) -> str:
    """Return a problem without the sentence of ``rest_text``."""
    return problem.partition(_REST)[0].rstrip()


def wait_after_stop(plan: LaunchPlan) -> str:
    """Return a sentence on the trackers that this node waits for after a request to stop; empty without any."""
    titles = [described_tracker(tracker).title for tracker in _mirrors(plan)] if plan.node == 0 else []
    return f" Then it waits up to {HURRIED_S} s for {', '.join(titles)} to take the rest." if titles else ""


def _mirrors(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the trackers of the record's plan, which a script of `launch run` may make later, or never."""
    if isinstance(plan, RunPlan):
        return mirrors_of(plan)
    try:
        recorded = RunPlan.of_record(plan.paths)
    except (OSError, ValueError, TypeError, LookupError, UserError):
        return ()
    return () if recorded is None else mirrors_of(recorded)
