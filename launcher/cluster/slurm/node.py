"""What Slurm starts on each node of a job: the agent, and what becomes of the job when it ends.

One task a node, one incarnation of the run for each time Slurm starts the job. Node 0 opens the incarnation and says
where the nodes meet; all of them read plan.json, which does not change. When Slurm wants the nodes back, or the time is
over, the workers save and leave, and node 0 has Slurm queue the job again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from launcher.cluster import events, jobfile
from launcher.cluster.agent import Ended, begin, load_plan, serve
from launcher.cluster.failure import Failure, failure
from launcher.cluster.network import free_port, socket_names
from launcher.cluster.slurm import client
from launcher.cluster.slurm.failures import Reports
from launcher.cluster.slurm.route import way_to, way_to_others
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, LauncherError, SiteError, Superseded
from launcher.incarnation import Fence, Incarnation
from launcher.paths import RunPaths, read_json, write_json
from launcher.plan import LaunchPlan, Place, RunPlan
from launcher.process import StopShield, die_with_parent

_MEET_WITHIN_S = 300
_LOOK_EVERY_S = 0.2
_ASK_AGAIN_S = 5
# so long a queued job may take to end its own processes
_REQUEUE_WITHIN_S = 120
# begun so often without one step more than before, a job is not begun again by itself
_FRUITLESS = 3


@dataclass(frozen=True)
class Task:
    """This node's part of the job: its number, the job's id, how often Slurm has restarted it, and its nodes."""

    job: str
    node: int
    nodes: int
    node_list: str
    restart: int

    @classmethod
    def here(cls) -> Task:
        env = os.environ
        return cls(
            job=env["SLURM_JOB_ID"],
            node=int(env["SLURM_NODEID"]),
            nodes=int(env["SLURM_JOB_NUM_NODES"]),
            node_list=env["SLURM_JOB_NODELIST"],
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),
        )


def run_node(run_dir: str, submission: int) -> NoReturn:
    """The task. Leaves with 0 when the run is done or will go on, 1 when it has failed, 75 when it was stopped."""
    die_with_parent(os.getppid(), signal.SIGTERM)  # of slurmstepd
    with StopShield() as shield:
        task, paths = Task.here(), RunPaths(Path(run_dir))
        _write_to(paths, task.node)
        fence = Fence(paths, Incarnation(submission, task.restart))
        try:
            status = _run(task, fence, shield)
        except Superseded as error:
            print(error, flush=True)
            status = EXIT_FAILED
        except Exception as error:
            traceback.print_exc()
            text = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
            told = failure(text, paths.node_log(task.node), kind=type(error).__name__, at=datetime.now(UTC))
            status = _failed(load_plan(paths.plan), task, fence, told)
        _stay_if_replaced(task, status)
    sys.exit(status)


def _stay_if_replaced(task: Task, status: int) -> None:
    """Do not return where Slurm has begun the job again without this node: its end would be taken for the end of the
    new start, whose step has the same number. A node that was cut off cannot know, and waits; once Slurm sees the node
    again, it ends what is left there."""
    if status == EXIT_DONE and task.node:  # nothing follows from it
        return
    while True:
        try:
            job = client.job(task.job)
        except SiteError:
            job = None
        else:
            if job is None or job.state != "RUNNING" or job.restarts == task.restart:
                return
        time.sleep(_ASK_AGAIN_S)


def _write_to(paths: RunPaths, node: int) -> None:
    """Standard output and error go to the node's log from here on."""
    with paths.node_log(node).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _run(task: Task, fence: Fence, shield: StopShield) -> int:
    paths = fence.paths
    print(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} incarnation {fence.own} on {socket.gethostname()}", flush=True)
    plan = load_plan(paths.plan)
    if _cancelled(paths):
        return EXIT_RESUMABLE
    plan = _meet(plan, task, fence)
    # a signal that came before there were handlers is lost; what it was about is not
    if task.node == 0 and shield.asked is None and _wanted_back(plan, task):
        shield.asked = signal.SIGUSR2
    ended = serve(plan, paths.plan, fence.own, shield)
    fence.check()
    return _conclude(plan, task, fence, ended)


def _meet(plan: LaunchPlan, task: Task, fence: Fence) -> LaunchPlan:
    """Node 0 opens the incarnation, and says in it where to meet.

    Raises:
        Superseded: Slurm has started the job again meanwhile.
        SiteError: no interface leads to the others, or node 0 did not come.
    """
    cluster = plan.cluster
    if task.node == 0:
        _open(task, fence)
        route = store = None
        if task.nodes > 1:
            route = way_to_others(cluster.interface)
            store = f"{route.interface.address}:{free_port(route.interface.address)}"
        fence.add(store=store)
    else:
        store = _wait_for_first(fence)["store"]
        route = way_to(store.rpartition(":")[0], cluster.interface)
    if route is None or store is None:
        return plan
    place = Place(
        node=task.node, address=route.interface.address, interface=route.interface.name, store=store, shared=True
    )
    names = socket_names(route, cluster.interface)
    return dataclasses.replace(
        plan,
        cluster=dataclasses.replace(cluster, place=place),
        env=dataclasses.replace(plan.env, default=names | plan.env.default),
    )


def _open(task: Task, fence: Fence) -> None:
    paths, before = fence.paths, fence.newest()
    steps = paths.newest_step()
    # of this submission: a person who resumes a run has perhaps mended what was in its way
    restarted = before.get("incarnation", "").partition(".")[0] == str(fence.own.submission)
    fruitless = before.get("fruitless", 0) + 1 if restarted and before.get("from_step") == steps else 0
    begin(fence, job=task.job, from_step=steps, fruitless=fruitless)
    names = client.host_names(task.node_list)
    fence.add(nodes=names)
    events.note(paths, "started", incarnation=str(fence.own), job=task.job, nodes=names, from_step=steps)


def _wait_for_first(fence: Fence) -> dict[str, Any]:
    end = time.monotonic() + _MEET_WITHIN_S
    while (newest := fence.newest()).get("incarnation") != str(fence.own) or not newest.get("store"):
        fence.check()
        if time.monotonic() > end:
            raise SiteError(f"node 0 has not begun incarnation {fence.own} within {_MEET_WITHIN_S} s.")
        time.sleep(_LOOK_EVERY_S)
    return newest


def _conclude(plan: LaunchPlan, task: Task, fence: Fence, ended: Ended) -> int:
    """What becomes of the job. Returns this task's exit status."""
    paths = fence.paths
    said = read_json(paths.summary) or {}
    if (told := ended.words.get("failure")) is not None:
        return _failed(plan, task, fence, told)
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
    write_json(paths.summary, {"verdict": verdict} | said | {"stopped_by": stopped_by})
    why = _wanted_back(plan, task, stopped_by)
    events.note(paths, verdict, by=stopped_by, why=why or "Slurm ends the job", step=said.get("steps"))
    return _requeue(plan, task, fence, why) if why else EXIT_RESUMABLE


def _wanted_back(plan: LaunchPlan, task: Task, signal_name: str = "") -> str:
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
    if _cancelled(paths):
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


def _cancelled(paths: RunPaths) -> bool:
    """Whether a person wants no more of it, whatever Slurm does with the job."""
    return jobfile.submissions(paths)[-1].cancelled


def _report(task: Task, fence: Fence, told: Failure) -> Reports:
    reports = Reports(fence, task.node, task.nodes)
    reports.add(told)
    event = "disconnected" if reports.of_connections_only() else "failed"
    events.note(fence.paths, event, node=task.node, rank=told["rank"], error=told["error"])
    return reports


def _failed(plan: LaunchPlan, task: Task, fence: Fence, told: Failure) -> int:
    """Tell a failure of the run from nodes that were lost: those are Slurm's to replace."""
    reports = _report(task, fence, told)
    if not reports.of_connections_only():
        return EXIT_FAILED
    print("The connection to other nodes is lost. Waiting for what they, or Slurm, say of it.", flush=True)
    again = reports.wait_for_slurm(task.job)
    # a script cannot be asked whether it gets anywhere: it would be begun again for ever
    if not again or not isinstance(plan, RunPlan):
        return EXIT_FAILED
    return _requeue(plan, task, fence, "the nodes lost each other")
