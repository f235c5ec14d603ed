"""Task that Slurm starts on each node of a job: runs the agent and finds the other nodes.

    python -m launcher.launch.slurm.node CALLS

There is one task per node and one attempt of the run per start of the job. Node 0 opens the attempt and
publishes where the nodes meet. All nodes use the plan for the node count of this start: plan.json or, with fewer nodes
than the job may have, plan.nodesN.json, which is derived from it. When Slurm reclaims the nodes, or the time limit is
near, the workers save and exit, and node 0 requeues the job (outcome.py decides).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, LauncherError, SiteError, Superseded, UserError
from launcher.launch.agent import load_plan, open_attempt, serve
from launcher.launch.local import report_outcome
from launcher.launch.network import Route, find_route, free_port, interface_env
from launcher.launch.slurm import client
from launcher.launch.slurm.client import SlurmTask
from launcher.launch.slurm.outcome import cancelled, conclude, conclude_failure, reason_to_requeue
from launcher.plan.launch_plan import HostPosition, LaunchPlan
from launcher.process import StopShield, die_with_parent, shared_interval, wait_until
from launcher.record.report_entry import leave_entry
from launcher.rundir import history
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_json, write_text
from launcher.rundir.job_end import failure_record
from launcher.rundir.paths import RunPaths

_MEET_WITHIN_S = 300
_LOOK_EVERY_S = 0.2
_ASK_AGAIN_S = 5


def main(calls: str) -> NoReturn:
    """Run the task whose arguments are in the file ``calls``: a list with one entry for each job of the array."""
    each = json.loads(Path(calls).read_text(encoding="utf-8"))
    run_node(*each[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))])


def run_node(run_dir: str, submission: int) -> NoReturn:
    """Run the task. Exits with the status of launcher/rundir/job_end.py, and 0 on other nodes after a stop."""
    die_with_parent(os.getppid(), signal.SIGTERM)  # the parent is slurmstepd
    with StopShield() as shield:
        task, paths = SlurmTask.here(), RunPaths(Path(run_dir))
        _write_to(paths, task.node)
        fence = Fence(paths, Incarnation(submission, task.restart))
        task = dataclasses.replace(task, can_ask=_can_ask(load_plan(paths.plan), task))
        status = EXIT_FAILED
        try:
            status = _run_or_report(task, fence, shield)
            if task.node == 0:
                leave_entry(paths)
                report_outcome(load_plan(paths.plan), {"verdict": "failed"} | (read_json(paths.summary) or {}))
        except Superseded as error:
            print(error, flush=True)
        finally:
            _stay_if_replaced(task, status)
    sys.exit(status)


def _can_ask(plan: LaunchPlan, task: SlurmTask) -> bool:
    """Return True if Slurm answers from here.

    A container may lack Slurm's commands, or have an incompatible version; Slurm then never answers, and waiting for
    it would never end.
    """
    assert plan.cluster.slurm is not None
    if plan.cluster.slurm.container is None:
        return True
    try:
        client.job(task.job)
    except SiteError as error:
        print(f"Slurm's commands do not work inside the container: {error}", flush=True)
        print("A stopped job is not requeued automatically. Continue it with `launch resume`.", flush=True)
        return False
    return True


def _stay_if_replaced(task: SlurmTask, status: int) -> None:
    """Do not return while Slurm has restarted the job without this node.

    The end of this task would be taken for the end of the new start, whose step has the same number. A node that was
    cut off cannot know, so it waits; once Slurm sees the node again, it kills what is left there.
    """
    if not task.can_ask or (status == EXIT_DONE and task.node):  # status 0 of another node has no consequences
        return

    def not_restarted() -> bool:
        try:
            job = client.job(task.job)
        except SiteError:
            return False
        return job is None or job.state != "RUNNING" or job.restarts == task.restart

    wait_until(not_restarted, every_s=shared_interval(_ASK_AGAIN_S, task.nodes, client.QUERIES_PER_S))


def _write_to(paths: RunPaths, node: int) -> None:
    """Redirect standard output and error to the node's log."""
    with paths.node_log(node).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _run(task: SlurmTask, fence: Fence, shield: StopShield) -> int:
    paths = fence.paths
    print(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} job {task.job} on {socket.gethostname()}", flush=True)
    if cancelled(paths):
        return EXIT_RESUMABLE
    plan, plan_file = _plan_for(task, fence)
    plan = _join_nodes(plan, task, fence)
    print(f"--- attempt {fence.newest().get('attempt')}", flush=True)
    # a signal that came before there were handlers is lost, but Slurm still knows its cause
    if task.node == 0 and shield.received is None and reason_to_requeue(plan, task):
        shield.received = signal.SIGUSR2
    ended = serve(plan, plan_file, fence.own, shield)
    fence.check()
    return conclude(plan, task, fence, ended)


def _run_or_report(task: SlurmTask, fence: Fence, shield: StopShield) -> int:
    """Run the task, and report an error that ends it. Raises Superseded if Slurm has restarted the job meanwhile."""
    try:
        return _run(task, fence, shield)
    except Superseded:
        raise
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
        record = failure_record(text, fence.paths.node_log(task.node), kind=type(error).__name__, at=datetime.now(UTC))
        return conclude_failure(load_plan(fence.paths.plan), task, fence, record)


def _plan_for(task: SlurmTask, fence: Fence) -> tuple[LaunchPlan, Path]:
    """Return the plan for the node count of this start, and its file, which node 0 writes before any node needs it.

    Raises:
        Superseded: Slurm has restarted the job meanwhile.
        UserError: There is no plan for this node count.
    """
    stored = load_plan(fence.paths.plan)
    plan = stored.on(task.nodes)
    if plan == stored:
        return plan, fence.paths.plan
    file = fence.paths.plan_for(task.nodes)
    if task.node == 0:
        fence.check()
        write_text(file, plan.to_json() + "\n")
    return plan, file


def _join_nodes(plan: LaunchPlan, task: SlurmTask, fence: Fence) -> LaunchPlan:
    """Return the plan with this node's place; node 0 opens the attempt and publishes where the nodes meet.

    Raises:
        Superseded: Slurm has restarted the job meanwhile.
        SiteError: No interface leads to the other nodes, or node 0 did not open the attempt in time.
    """
    cluster = plan.cluster
    if task.node == 0:
        _open_attempt(plan, task, fence)
        route = store = None
        if task.nodes > 1:
            route = route_to_others(cluster.interface)
            store = f"{route.interface.address}:{free_port(route.interface.address)}"
        fence.add(store=store)
    else:
        store = _wait_for_node_0(fence, shared_interval(_LOOK_EVERY_S, task.nodes))["store"]
        route = route_to(store.rpartition(":")[0], cluster.interface)
    if route is None or store is None:
        return plan
    place = HostPosition(
        node=task.node, address=route.interface.address, interface=route.interface.name, store=store, shared=True
    )
    names = interface_env(route, cluster.interface)
    return dataclasses.replace(plan.at(place), env=dataclasses.replace(plan.env, default=names | plan.env.default))


def _open_attempt(plan: LaunchPlan, task: SlurmTask, fence: Fence) -> None:
    paths, before = fence.paths, fence.newest()
    steps = paths.newest_step()
    # count within this submission only: whoever resumes a run may have fixed the cause
    restarted = before.get("incarnation", "").partition(".")[0] == str(fence.own.submission)
    fruitless = before.get("fruitless", 0) + 1 if restarted and before.get("from_step") == steps else 0
    ranks = plan.cluster.world_size
    attempt = open_attempt(fence, job=task.job, from_step=steps, fruitless=fruitless, ranks=ranks)
    names = client.host_names(task.node_list) if task.can_ask else [task.node_list]
    fence.add(nodes=names, output_from=client.output_size(paths, task.job))
    history.note_event(paths, "started", attempt=attempt, job=task.job, nodes=names, ranks=ranks)


def _wait_for_node_0(fence: Fence, every_s: float) -> dict[str, Any]:
    def started() -> dict[str, Any] | None:
        fence.check()
        newest = fence.newest()
        return newest if newest.get("incarnation") == str(fence.own) and newest.get("store") else None

    newest = wait_until(started, _MEET_WITHIN_S, every_s)
    if newest is None:
        raise SiteError(f"node 0 has not opened this attempt within {_MEET_WITHIN_S} s.")
    return newest


def route_to_others(interface: str | None) -> Route:
    """Return the route from node 0 to the other nodes.

    It goes by the address at which Slurm reaches node 0. If that is a name which this node resolves to loopback, it is
    the route to Slurm's controller or, if Slurm cannot be asked, by the address of srun, which runs on node 0.

    Raises:
        SiteError: None of them gives a route, or ``interface`` does not exist.
    """
    try:
        return route_to(client.node_address(os.environ["SLURMD_NODENAME"]), interface)
    except SiteError:
        address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        with suppress(SiteError):
            address = client.controller_address() or address
        if address is None:
            raise
        return route_to(address, interface)


def route_to(address: str, interface: str | None) -> Route:
    """Return the route to ``address``. Raises SiteError as ``find_route``, in terms of Slurm's configuration."""
    try:
        return find_route(f"{address}:1", interface)
    except UserError as error:
        before, own_key, problem = str(error).partition("\n")[0].rpartition(f"cluster.rendezvous={address}:1: ")
        if before or not own_key:
            raise
        raise SiteError(
            f"no route to the other nodes through {address}: {problem}\n"
            "  NodeAddr in slurm.conf must be an address that the other nodes reach; of several networks "
            "cluster.interface names one."
        ) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
