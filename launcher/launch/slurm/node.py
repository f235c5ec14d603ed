"""What Slurm starts on each node of a job: the agent, its way to the other nodes, and what becomes of the job.

One task a node, one incarnation of the run for each time Slurm starts the job. Node 0 opens the incarnation and says
where the nodes meet; all of them read the plan for as many nodes as this start has: plan.json, or where those are fewer
than the job may have, plan.nodesN.json, which follows from it. When Slurm wants the nodes back, or the time is over,
the workers save and leave, and node 0 has Slurm queue the job again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, LauncherError, SiteError, Superseded, UserError
from launcher.launch.agent import begin, load_plan, serve
from launcher.launch.network import Route, find_route, free_port, socket_names
from launcher.launch.slurm import client
from launcher.launch.slurm.client import Task
from launcher.launch.slurm.outcome import cancelled, conclude, failed, wanted_back
from launcher.plan.launch_plan import LaunchPlan, Place
from launcher.process import StopShield, die_with_parent
from launcher.rundir import records
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import write_text
from launcher.rundir.paths import RunPaths
from launcher.rundir.records import failure

_MEET_WITHIN_S = 300
_LOOK_EVERY_S = 0.2
_ASK_AGAIN_S = 5


def run_node(run_dir: str, submission: int) -> NoReturn:
    """The task. Leaves with 0 when the run is done or will go on, 1 when it has failed, 75 when it was stopped."""
    die_with_parent(os.getppid(), signal.SIGTERM)  # of slurmstepd
    with StopShield() as shield:
        task, paths = Task.here(), RunPaths(Path(run_dir))
        _write_to(paths, task.node)
        fence = Fence(paths, Incarnation(submission, task.restart))
        task = dataclasses.replace(task, can_ask=_can_ask(load_plan(paths.plan), task))
        try:
            status = _run(task, fence, shield)
        except Superseded as error:
            print(error, flush=True)
            status = EXIT_FAILED
        except Exception as error:
            traceback.print_exc()
            text = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
            told = failure(text, paths.node_log(task.node), kind=type(error).__name__, at=datetime.now(UTC))
            status = failed(load_plan(paths.plan), task, fence, told)
        _stay_if_replaced(task, status)
    sys.exit(status)


def _can_ask(plan: LaunchPlan, task: Task) -> bool:
    """A container may lack Slurm's commands, or have those of a version that Slurm does not speak with; then it is
    silent for ever, and who waits for its answer would never leave."""
    assert plan.cluster.slurm is not None
    if plan.cluster.slurm.container is None:
        return True
    try:
        client.job(task.job)
    except SiteError as error:
        print(f"From within the container Slurm cannot be asked: {error}", flush=True)
        print("A job that is stopped is not queued again by itself: `launch resume` goes on.", flush=True)
        return False
    return True


def _stay_if_replaced(task: Task, status: int) -> None:
    """Do not return where Slurm has begun the job again without this node: its end would be taken for the end of the
    new start, whose step has the same number. A node that was cut off cannot know, and waits; once Slurm sees the node
    again, it ends what is left there."""
    if not task.can_ask or (status == EXIT_DONE and task.node):  # the latter: nothing follows from it
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
    if cancelled(paths):
        return EXIT_RESUMABLE
    plan, plan_file = _plan_for(task, fence)
    plan = _meet(plan, task, fence)
    # a signal that came before there were handlers is lost; what it was about is not
    if task.node == 0 and shield.asked is None and wanted_back(plan, task):
        shield.asked = signal.SIGUSR2
    ended = serve(plan, plan_file, fence.own, shield)
    fence.check()
    return conclude(plan, task, fence, ended)


def _plan_for(task: Task, fence: Fence) -> tuple[LaunchPlan, Path]:
    """The plan on as many nodes as this start has, and its file, which node 0 writes before any node can need it.

    Raises:
        Superseded: Slurm has started the job again meanwhile.
        UserError: it was not planned for so many.
    """
    whole = load_plan(fence.paths.plan)
    plan = whole.on(task.nodes)
    if plan == whole:
        return plan, fence.paths.plan
    file = fence.paths.plan_for(task.nodes)
    if task.node == 0:
        fence.check()
        write_text(file, plan.to_json() + "\n")
    return plan, file


def _meet(plan: LaunchPlan, task: Task, fence: Fence) -> LaunchPlan:
    """Node 0 opens the incarnation, and says in it where to meet.

    Raises:
        Superseded: Slurm has started the job again meanwhile.
        SiteError: no interface leads to the others, or node 0 did not come.
    """
    cluster = plan.cluster
    if task.node == 0:
        _open(plan, task, fence)
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


def _open(plan: LaunchPlan, task: Task, fence: Fence) -> None:
    paths, before = fence.paths, fence.newest()
    steps = paths.newest_step()
    # of this submission: a person who resumes a run has perhaps mended what was in its way
    restarted = before.get("incarnation", "").partition(".")[0] == str(fence.own.submission)
    fruitless = before.get("fruitless", 0) + 1 if restarted and before.get("from_step") == steps else 0
    ranks = plan.cluster.world_size
    begin(fence, job=task.job, from_step=steps, fruitless=fruitless, ranks=ranks)
    names = client.host_names(task.node_list) if task.can_ask else [task.node_list]
    fence.add(nodes=names)
    records.note_event(
        paths, "started", incarnation=str(fence.own), job=task.job, nodes=names, ranks=ranks, from_step=steps
    )


def _wait_for_first(fence: Fence) -> dict[str, Any]:
    end = time.monotonic() + _MEET_WITHIN_S
    while (newest := fence.newest()).get("incarnation") != str(fence.own) or not newest.get("store"):
        fence.check()
        if time.monotonic() > end:
            raise SiteError(f"node 0 has not begun incarnation {fence.own} within {_MEET_WITHIN_S} s.")
        time.sleep(_LOOK_EVERY_S)
    return newest


def way_to_others(interface: str | None) -> Route:
    """Of the first node: by the address at which Slurm reaches it; where that is a name that this node takes for its
    loopback, the way to Slurm's controller. Where Slurm cannot be asked, by the address that srun has told its tasks:
    it runs on the first node.

    Raises:
        SiteError: neither leads anywhere; no such interface.
    """
    try:
        return way_to(client.node_address(os.environ["SLURMD_NODENAME"]), interface)
    except SiteError:
        address = _of_controller() or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        if address is None:
            raise
        return way_to(address, interface)


def _of_controller() -> str | None:
    try:
        return client.controller_address()
    except SiteError:
        return None


def way_to(address: str, interface: str | None) -> Route:
    """Raises SiteError as ``find_route`` does, without the key that jobs of Slurm's do not have."""
    try:
        return find_route(f"{address}:1", interface)
    except UserError as error:
        before, own_key, problem = str(error).partition("\n")[0].rpartition(f"cluster.rendezvous={address}:1: ")
        if before or not own_key:
            raise
        raise SiteError(
            f"the way to the other nodes, through {address}: {problem}\n"
            "  NodeAddr in slurm.conf must be an address that the other nodes reach; of several networks "
            "cluster.interface names one."
        ) from None
