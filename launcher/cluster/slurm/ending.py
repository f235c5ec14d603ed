"""What becomes of a job of Slurm's when the workers of a node have ended: over, queued again, or failed.

Slurm is asked what a signal was about, and the other nodes what they have seen: neither is guessed.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from launcher.cluster import events, jobfile
from launcher.cluster.agent import Ended
from launcher.cluster.failure import Failure, failure
from launcher.cluster.slurm import client
from launcher.cluster.slurm.failures import Reports
from launcher.cluster.slurm.task import Task
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, SiteError
from launcher.incarnation import Fence
from launcher.paths import RunPaths, read_json, write_json
from launcher.plan import LaunchPlan, RunPlan

# so long a queued job may take to end its own processes
_REQUEUE_WITHIN_S = 120
# begun so often without one step more than before, a job is not begun again by itself
_FRUITLESS = 3


def conclude(plan: LaunchPlan, task: Task, fence: Fence, ended: Ended) -> int:
    """What becomes of the job. Returns this task's exit status."""
    paths = fence.paths
    said = read_json(paths.summary) or {}
    hang = {"hang": ended.words["hang"]} if "hang" in ended.words else {}
    if hang:
        write_json(paths.summary, {"verdict": "killed"} | said | hang)
    if (told := ended.words.get("failure")) is not None:
        return failed(plan, task, fence, told)
    others = Reports(fence, task.node, task.nodes)
    if others.all() and not others.of_connections_only():  # this node was told to stop because another one has failed
        return EXIT_FAILED
    stopped_by = ended.words.get("stopped_by") or (said.get("verdict") == "stopped" and "a signal on another node")
    if not stopped_by:
        if task.node == 0 and ended.status == EXIT_DONE:
            if not isinstance(plan, RunPlan):
                write_json(paths.summary, {"verdict": "done"})
            events.note(paths, "done", step=said.get("steps"))
        return ended.status
    if task.node:
        return EXIT_DONE  # node 0 says what follows
    # workers that could not save in time leave no word of it
    verdict = "stopped" if said or not isinstance(plan, RunPlan) else "killed"
    write_json(paths.summary, {"verdict": verdict} | said | hang | {"stopped_by": stopped_by})
    why = wanted_back(plan, task, stopped_by)
    events.note(paths, verdict, by=stopped_by, why=why or "Slurm ends the job", step=said.get("steps"))
    return _requeue(plan, task, fence, why) if why else EXIT_RESUMABLE


def wanted_back(plan: LaunchPlan, task: Task, signal_name: str = "") -> str:
    """Why the job is to stop and go on later, by what Slurm says of it; empty where it is not."""
    assert plan.cluster.slurm is not None
    try:
        job = client.job(task.job)
    except SiteError as error:
        print(f"{error}", file=sys.stderr, flush=True)
        job = None
    if job is not None and job.state != "RUNNING":  # it is being cancelled, or requeued
        return ""
    if job is not None and job.preempted:
        return "preempted"
    # Slurm looks at the time every 30 s, and so may say it early
    if job is not None and job.end and (job.end - datetime.now()).total_seconds() < plan.cluster.slurm.signal_s + 60:
        return "time limit" if signal_name else ""
    return "told to" if signal_name == "SIGUSR2" else ""


def _requeue(plan: LaunchPlan, task: Task, fence: Fence, why: str) -> int:
    """Have Slurm queue the job again; it then ends this process. Returns only where that did not happen."""
    paths, newest = fence.paths, fence.newest()
    if isinstance(plan, RunPlan):
        if not plan.checkpoint.enabled:
            print("checkpoint.enabled=false: nothing was saved, and the job is not queued again.", flush=True)
            return EXIT_RESUMABLE
        if newest.get("fruitless", 0) >= _FRUITLESS and paths.newest_step() == newest.get("from_step"):
            error = (
                f"begun {_FRUITLESS + 1} times without getting one step further ({why}): cluster.time is too short for "
                "the start, one step and one checkpoint"
            )
            _report(task, fence, failure(error, paths.node_log(task.node), at=datetime.now(UTC)))
            return EXIT_FAILED
    if cancelled(paths):
        return EXIT_RESUMABLE
    fence.check()
    events.note(paths, "requeued", why=why)  # before it is so: it ends this process
    try:
        client.requeue(task.job)
    except SiteError as error:
        events.note(paths, "not requeued", why=str(error))
        print(f"The job could not be queued again: {error}\n  `launch resume` goes on.", file=sys.stderr, flush=True)
        return EXIT_RESUMABLE
    time.sleep(_REQUEUE_WITHIN_S)
    return EXIT_RESUMABLE


def cancelled(paths: RunPaths) -> bool:
    """Whether a person wants no more of it, whatever Slurm does with the job."""
    return jobfile.submissions(paths)[-1].cancelled


def _report(task: Task, fence: Fence, told: Failure) -> Reports:
    reports = Reports(fence, task.node, task.nodes)
    reports.add(told)
    event = "disconnected" if reports.of_connections_only() else "failed"
    events.note(fence.paths, event, node=task.node, rank=told["rank"], error=told["error"])
    return reports


def failed(plan: LaunchPlan, task: Task, fence: Fence, told: Failure) -> int:
    """Tell a failure of the run from nodes that were lost: those are Slurm's to replace."""
    reports = _report(task, fence, told)
    if not reports.of_connections_only():
        return EXIT_FAILED
    print("The connection to other nodes is lost. Waiting for what they, or Slurm, say of it.", flush=True)
    again = reports.wait_for_slurm(task.job, can_ask=task.can_ask)
    # a script cannot be asked whether it gets anywhere: it would be begun again for ever
    if not again or not isinstance(plan, RunPlan):
        return EXIT_FAILED
    return _requeue(plan, task, fence, "the nodes lost each other")
