"""Outcome of a Slurm job: done, requeued or failed, and which node failed first.

The cause of a signal comes from Slurm, and failures come from the reports of all nodes; neither is guessed.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, SiteError
from launcher.launch.local import report_outcome
from launcher.launch.slurm import client
from launcher.launch.slurm.client import SlurmTask
from launcher.plan.callback_plan import REQUEUED
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import first_number, shared_interval, wait_until
from launcher.rundir import history
from launcher.rundir.fencing import Fence
from launcher.rundir.files import read_json, write_json
from launcher.rundir.job_end import (
    LOST_STEP,
    Failure,
    Summary,
    end_status,
    failed_summary,
    failure_record,
    lost_its_peers,
)
from launcher.rundir.paths import RunPaths

# seconds for messages after a requeue: Slurm ends the processes of the job meanwhile
_REPORT_WITHIN_S = 5.0
# seconds for which a failing query or requeue is repeated at least, and the interval
_RETRY_WITHIN_S, _RETRY_EVERY_S = 60.0, 1.0
# seconds within which a node reports why it was stopped
_REASON_WITHIN_S = 30.0
# answers of `scontrol requeue` that repeating does not change
_REFUSED = re.compile(r"not on this machine's PATH|Invalid job id|disabled|[Dd]enied|permission")
# seconds that Slurm may take to end the processes of a job that it requeues
_REQUEUE_WITHIN_S = 120
# a job that was restarted so often without a further step is not requeued again
_MOST_FRUITLESS_STARTS = 3


def conclude(plan: LaunchPlan, task: SlurmTask, fence: Fence, ended: Summary) -> int:
    """Write the verdict, requeue the job if it is to continue, and return this task's exit status.

    Args:
        ended: what the agent adds to the summary.
    """
    paths = fence.paths
    summary = read_json(paths.summary) or {}
    hang = {"hang": ended["hang"]} if "hang" in ended else {}
    if hang:
        write_json(paths.summary, {"verdict": "killed"} | summary | hang)
    if (own := ended.get("failure")) is not None:
        return conclude_failure(plan, task, fence, own)
    others = Reports(fence, task.node, task.nodes)
    if others.all() and not others.only_lost_connections():  # this node was stopped because another one failed
        return EXIT_FAILED
    stopped_by = ended.get("stopped_by") or (summary.get("verdict") == "stopped" and "a signal on another node")
    if stopped_by == "a signal on another node":
        wait_until(others.all, _REASON_WITHIN_S)
    elif stopped_by and task.lost_parent:
        error = f"slurmstepd, the Slurm process on {socket.gethostname()} that runs task {task.node}, was killed"
        others.write(failure_record(error, paths.node_log(task.node), kind=LOST_STEP, at=datetime.now(UTC)))
    elif stopped_by and task.node == 0 and others.find_killed_task(task):
        return EXIT_FAILED
    if not stopped_by:
        if ended.get("verdict") == "killed":  # another node has given up, and is about to report why
            wait_until(others.all, _REASON_WITHIN_S)
            return EXIT_FAILED
        status = end_status({"verdict": "done"} | ended)
        if task.node == 0 and status == EXIT_DONE:
            if not isinstance(plan, RunPlan):
                write_json(paths.summary, summary | {"verdict": "done"})  # a script on the engine has written its own
            history.note_event(paths, "done", step=summary.get("steps"))
        return status
    if task.node:
        return EXIT_DONE  # node 0 decides
    lost = next((str(each["error"]) for each in others.all().values() if each["kind"] == LOST_STEP), "")
    stopped_by = lost or stopped_by
    # workers that could not save in time leave no summary
    verdict = "stopped" if summary or not isinstance(plan, RunPlan) else "killed"
    write_json(paths.summary, {"verdict": verdict} | summary | hang | {"stopped_by": stopped_by})
    why = reason_to_requeue(plan, task, stopped_by)
    # a `launch run` script reports no progress, so it might be restarted without end
    if lost and isinstance(plan, RunPlan) and ((job := _job(task.job)) is None or job.state == "RUNNING"):
        why = lost
    history.note_event(paths, verdict, by=stopped_by, why=why or "Slurm ends the job", step=summary.get("steps"))
    return _requeue_unless_futile(plan, task, fence, why) if why else EXIT_RESUMABLE


def reason_to_requeue(plan: LaunchPlan, task: SlurmTask, signal_name: str = "") -> str:
    """Return why the job is to stop now and continue later, as reported by Slurm; empty if it is not to continue."""
    assert plan.cluster.slurm is not None
    # only Slurm knows the cause of a SIGTERM
    within_s = _grace_s(plan) if signal_name == "SIGTERM" and task.can_ask else 0
    job = _job(task.job, within_s)
    if job is not None and job.state != "RUNNING":  # it is being cancelled, or requeued
        return ""
    if job is not None and job.preempted:
        return "preempted"
    # Slurm checks time limits every 30 s, so its signal may come early
    if job is not None and job.end and (job.end - datetime.now()).total_seconds() < plan.cluster.slurm.signal_s + 60:
        return "time limit" if signal_name else ""
    return "SIGUSR2" if signal_name == "SIGUSR2" else ""


def _grace_s(plan: LaunchPlan) -> float:
    """Return the seconds that the job has, at least, between a stop signal and its end."""
    assert plan.cluster.slurm is not None
    return max(plan.cluster.slurm.signal_s, _RETRY_WITHIN_S)


def _job(job_id: str, within_s: float = 0.0) -> client.SlurmJob | None:
    """Return what Slurm knows of the job; None if it knows no such job, or has not answered within ``within_s``
    seconds: this node may be cut off."""
    end = time.monotonic() + within_s
    while True:
        try:
            return client.job(job_id)
        except SiteError as error:
            print(f"{error}", file=sys.stderr, flush=True)
        if time.monotonic() >= end:
            return None
        time.sleep(_RETRY_EVERY_S)


def _requeue_unless_futile(plan: LaunchPlan, task: SlurmTask, fence: Fence, why: str) -> int:
    """Requeue the job, upon which Slurm ends this process. Returns an exit status only if that did not happen."""
    paths, newest = fence.paths, fence.newest()
    if isinstance(plan, RunPlan):
        if not plan.checkpoint.enabled:
            print("checkpoint.enabled=false: nothing was saved, so the job is not requeued.", flush=True)
            return EXIT_RESUMABLE
        if newest.get("fruitless", 0) >= _MOST_FRUITLESS_STARTS and paths.newest_step() == newest.get("from_step"):
            error = (
                f"started {_MOST_FRUITLESS_STARTS + 1} times without getting one step further ({why}): cluster.time is "
                "too short for the start, one step and one checkpoint"
            )
            _report(task, fence, failure_record(error, paths.node_log(task.node), at=datetime.now(UTC)))
            return EXIT_FAILED
    if cancelled(paths):
        return EXIT_RESUMABLE
    fence.check()
    if error := _requeue(plan, task, fence):
        history.note_event(paths, "not requeued", why=error)
        print(
            f"The job could not be requeued: {error}\n  Continue it with `launch resume`.", file=sys.stderr, flush=True
        )
        return EXIT_RESUMABLE
    # Slurm now sends SIGTERM, which the shield takes, and kills what is left after KillWait (30 s)
    fence.check()
    history.note_event(paths, "requeued", why=why)
    report_outcome(plan, (read_json(paths.summary) or {}) | {"verdict": REQUEUED}, _REPORT_WITHIN_S)
    time.sleep(_REQUEUE_WITHIN_S)
    return EXIT_RESUMABLE


def _requeue(plan: LaunchPlan, task: SlurmTask, fence: Fence) -> str:
    """Requeue the job, and repeat that until the grace is over. Return why it was not requeued; empty if it was."""
    end = time.monotonic() + _grace_s(plan)
    while True:
        try:
            client.requeue(task.job)
            return ""
        except SiteError as error:
            why = str(error)
        print(f"{why}\n  Trying again.", file=sys.stderr, flush=True)
        job = _job(task.job)  # the request may have arrived although the answer was lost
        if job is not None and (job.restarts > task.restart or job.state in client.WAITING):
            return ""
        over = job is not None and job.state in client.ENDED
        if over or _REFUSED.search(why) or time.monotonic() >= end or cancelled(fence.paths):
            return why
        time.sleep(_RETRY_EVERY_S)


def cancelled(paths: RunPaths) -> bool:
    """Return True if a person cancelled the run, whatever Slurm does with the job."""
    return history.submissions(paths)[-1].cancelled


def _report(task: SlurmTask, fence: Fence, own: Failure) -> Reports:
    reports = Reports(fence, task.node, task.nodes)
    reports.add(own)
    event = "disconnected" if reports.only_lost_connections() else "failed"
    history.note_event(fence.paths, event, node=task.node, rank=own["rank"], error=own["error"])
    return reports


def conclude_failure(plan: LaunchPlan, task: SlurmTask, fence: Fence, own: Failure) -> int:
    """Return the exit status after a failure; if only connections were lost, have Slurm replace the lost nodes."""
    reports, status = _report(task, fence, own), end_status(failed_summary(own))
    if not reports.only_lost_connections():
        return status
    print("The connection to other nodes is lost. Waiting for reports of these nodes or of Slurm.", flush=True)
    requeue = reports.wait_for_slurm(task)
    # a `launch run` script reports no progress, so it might be restarted without end
    if not requeue or not isinstance(plan, RunPlan):
        return status
    return _requeue_unless_futile(plan, task, fence, "the nodes lost each other")


_LOOK_EVERY_S = 1.0
# in addition to SlurmdTimeout, after which Slurm gives up a silent node
_SLURM_ACTS_WITHIN_S = 60
_SLURMD_TIMEOUT_S = 300  # Slurm's default


class Reports:
    """Failure reports of the nodes of one attempt, in files of the run's directory."""

    def __init__(self, fence: Fence, node: int, nodes: int) -> None:
        self._fence, self._node, self._nodes = fence, node, nodes
        self._read: dict[int, Failure] = {}  # a node writes one report in an attempt

    def add(self, failure: Failure) -> None:
        """Report the failure of this node's workers, and put the earliest failure of any node into the summary."""
        paths = self._fence.paths
        self.write(failure | {"node": self._node, "host": socket.gethostname()})
        failures: dict[int, Failure] = {}
        while (newest := self.all()) != failures:  # another node may have added its own while this one wrote
            failures = newest
            # the nodes' clocks differ: a rank that lost a peer is never the cause if another failed otherwise
            first = min(failures.values(), key=lambda failure: (lost_its_peers(failure), failure.get("at", "~")))
            write_json(paths.summary, (read_json(paths.summary) or {}) | failed_summary(first))

    def write(self, failure: Failure) -> None:
        """Report a failure to the other nodes, and leave the summary as it is."""
        self._fence.check()
        own = {"node": self._node} | failure
        write_json(self._fence.paths.failure_of(own["node"]), {"incarnation": str(self._fence.own), "failure": own})

    def find_killed_task(self, task: SlurmTask) -> bool:
        """Return True if Slurm reports that a task was killed, which cannot report itself; the run then failed by it.

        Only the first node of those that have reported anything writes that.
        """
        paths = self._fence.paths
        killed = client.killed_task(paths, task.job, self._fence.newest().get("output_from", 0))
        if killed is None or killed.node in (failures := self.all()) or killed.node == self._node:
            return False
        if self._node == min(failures, default=self._node):
            log = client.file_of_output(paths, task.job)
            failure = failure_record(str(killed), log, at=datetime.now(UTC)) | {
                "node": killed.node,
                "host": killed.host,
            }
            self.write(failure)
            write_json(paths.summary, (read_json(paths.summary) or {}) | failed_summary(failure))
            history.note_event(paths, "failed", node=killed.node, error=str(killed))
        return True

    def all(self) -> dict[int, Failure]:
        """Return the failures by node.

        Only the files that exist are opened, each once: every node does this, and their number squared is large.
        """
        for node in self._fence.paths.failed_nodes():
            if node not in self._read and node < self._nodes:
                report = read_json(self._fence.paths.failure_of(node)) or {}
                if report.get("incarnation") == str(self._fence.own):
                    self._read[node] = report["failure"]
        return dict(sorted(self._read.items()))

    def only_lost_connections(self) -> bool:
        """Return True if every node that failed only lost some of its peers; then none of them is the cause."""
        return self._nodes > 1 and all(map(lost_its_peers, self.all().values()))

    def wait_for_slurm(self, task: SlurmTask) -> bool:
        """Wait for Slurm to notice that a node is gone: it then restarts the job and ends this process.

        Returns:
            True if this node must requeue the job instead, because all nodes are up but lost each other, srun has
            given up one of them, or Slurm does not act on a silent node. False if a node reported the cause, Slurm
            reports a killed task, Slurm ends the job, or, without ``can_ask``, Slurm had time enough to do so.

        Raises:
            Superseded: The job continues elsewhere.
        """
        end = time.monotonic() + _slurmd_timeout_s() + _SLURM_ACTS_WITHIN_S
        while True:
            self._fence.check()
            if not self.only_lost_connections() or self.find_killed_task(task):
                return False
            if not task.can_ask and time.monotonic() > end:
                return False
            if task.can_ask and (job := _job(task.job)) is not None:
                if job.state != "RUNNING":  # Slurm has ended the job, or is about to
                    return False
                failures = self.all()
                gave_up = client.gave_up(self._fence.paths, task.job, self._fence.newest().get("output_from", 0))
                if len(failures) == self._nodes or gave_up or time.monotonic() > end:
                    return self._node == min(failures)
            time.sleep(shared_interval(_LOOK_EVERY_S, self._nodes, client.QUERIES_PER_S))


def _slurmd_timeout_s() -> int:
    with suppress(SiteError):
        if "SlurmdTimeout" in (settings := client.settings()):
            return first_number(settings, "SlurmdTimeout")
    return _SLURMD_TIMEOUT_S
