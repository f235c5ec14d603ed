"""Several hosts without a scheduler: the same command is typed on each, and they meet at an address of one of them.

The host that owns the address is node 0. It waits there for the others, checks that all were given the same job, and
sends each the run's name and id and a node number. No worker starts before every host has its directory.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import SiteError, UserError
from launcher.launch import local
from launcher.launch.gathering import Say, facts, wait_for_hosts
from launcher.launch.network import (
    PROTOCOL,
    Channel,
    Door,
    Message,
    Route,
    find_route,
    free_port,
    require_reach,
    socket_names,
)
from launcher.launch.peers import FirstHost, OtherHost, Peers
from launcher.plan.launch_plan import LaunchPlan, Place, RunInfo
from launcher.plan.run_plan import RunPlan
from launcher.process import wait_until
from launcher.rundir.files import read_json, write_text

# seconds that node 0 waits for the others, and every other host for node 0
MEET_WITHIN_S = 600
_ANSWER_WITHIN_S = 60
_RETRY_S = 0.5

P = TypeVar("P", bound=LaunchPlan)


def gather(plan: P, config_yaml: str, run_name: str | None, say: Say) -> tuple[P, Peers]:
    """Meet the other hosts and make the run's directory.

    Args:
        plan: plan that this host made by itself.
        run_name: run.name as the user set it, or None.
        say: shows one line to the user.

    Returns:
        The plan of this host in the common run, and the connection to the others.

    Raises:
        SiteError: There is no route to the others, too few came in time, or one host cannot make the directory.
        UserError: The hosts were not given the same job. Every host gets the same message.
    """
    assert plan.cluster.rendezvous is not None
    route = find_route(plan.cluster.rendezvous, plan.cluster.interface)
    names = socket_names(route, plan.cluster.interface)
    plan = dataclasses.replace(plan, env=dataclasses.replace(plan.env, default=names | plan.env.default))
    return (lead if route.here else join)(plan, config_yaml, route, facts(plan, run_name), say)


def lead(plan: P, config_yaml: str, route: Route, known: Message, say: Say) -> tuple[P, Peers]:
    """Gather the other hosts as node 0."""
    try:
        door = Door(route.rendezvous)
    except OSError as error:
        raise SiteError(
            f"cluster.rendezvous={route.shown}: cannot listen there: {error.strerror}.\n"
            "  Another job or program has the port: choose another one."
        ) from None
    guests: list[Channel] = []
    made = False
    try:
        wait_for_hosts(door, guests, plan.cluster.range, known, route, say, MEET_WITHIN_S)
        plan = plan.on(len(guests) + 1)
        address = route.interface.address
        store = f"{address}:{free_port(address)}"
        own = Place(node=0, address=address, interface=route.interface.name, store=store, shared=True)
        plan = _placed(plan, plan.run, own)
        local.create(plan, config_yaml)
        made = True
        run = {"name": plan.run.name, "id": plan.run.id, "created": plan.run.created}
        for node, guest in enumerate(guests, 1):
            guest.send(welcome=run, node=node, nodes=plan.cluster.nodes, store=store)
        _require_ready(guests, plan, route.rendezvous[1])
        for guest in guests:
            guest.send(go=True)
    except BaseException as error:
        for guest in guests:
            if isinstance(error, UserError):
                guest.send(refused=str(error))
            guest.close()
        door.close()
        if made:
            shutil.rmtree(plan.paths.root, ignore_errors=True)
        raise
    return plan, FirstHost(door, guests, address, _refusal(plan, route), _least(plan))


def _refusal(plan: LaunchPlan, route: Route) -> str:
    """Return the message for a host that comes when the run has started."""
    fixed = plan.cluster.min_nodes is None
    why = f"has all its {plan.cluster.nodes} hosts" if fixed else "is under way, and no host can join it"
    return (
        f"cluster.rendezvous={route.shown}: the run there, {plan.run.name}, {why}.\n"
        "  For a job of its own, choose another port or another first host."
    )


def _least(plan: LaunchPlan) -> int | None:
    """Return the fewest hosts with which the run continues after a loss; None if it ends, e.g. without checkpoints."""
    return plan.cluster.min_nodes if isinstance(plan, RunPlan) and plan.checkpoint.enabled else None


def _require_ready(guests: list[Channel], plan: LaunchPlan, port: int) -> None:
    """Check that every host has made its directory and can be reached at its workers' address. Raises SiteError."""
    for node, guest in enumerate(guests, 1):
        who = f"node {node} ({guest.peer})"
        answer = guest.next(_ANSWER_WITHIN_S)
        if answer is None:
            raise SiteError(f"{who} left before the job began. Nothing was started.")
        if "refused" in answer:
            raise SiteError(f"on {who}: {answer['refused']}")
        require_reach(str(answer.get("address", guest.peer)), port, who)
        if isinstance(plan, RunPlan) and plan.checkpoint.enabled and not answer.get("shared"):
            raise SiteError(
                f"checkpoint.enabled=true: {who} does not see {plan.run.dir} of node 0, and the parts of a checkpoint "
                "would lie on different hosts.\n  Use a run.dir on a disk that all of them share, or "
                "checkpoint.enabled=false."
            )


def join(plan: P, config_yaml: str, route: Route, known: Message, say: Say) -> tuple[P, Peers]:
    """Join node 0 as one of the other hosts."""
    channel = _connect(route, say)
    made = False
    try:
        channel.send(launch=PROTOCOL, facts=known)
        greeting = channel.next(_ANSWER_WITHIN_S)
        if greeting is None or greeting.get("launch") != PROTOCOL:
            raise SiteError(
                f"cluster.rendezvous={route.shown}: what answers there is no `launch` of this version that waits for "
                "hosts.\n  Start it on the first host, or choose a port that nothing else uses."
            )
        welcome = _answer(channel, "welcome", MEET_WITHIN_S)
        place = Place(
            node=int(welcome["node"]), address=route.interface.address, interface=route.interface.name,
            store=str(welcome["store"]), shared=False,
        )  # fmt: skip
        try:
            require_reach(place.store.rpartition(":")[0], route.rendezvous[1], "node 0")
            plan = _placed(plan.on(int(welcome["nodes"])), _common_run(plan.run, welcome["welcome"]), place)
            plan, made = _make_directory(plan, config_yaml)
        except SiteError as error:
            channel.send(refused=str(error))
            raise
        channel.send(ready=True, shared=not made, address=place.address)
        _answer(channel, "go", _ANSWER_WITHIN_S + MEET_WITHIN_S)
    except BaseException:
        channel.close()
        if made:
            shutil.rmtree(plan.paths.root, ignore_errors=True)
        raise
    return plan, OtherHost(channel)


def _connect(route: Route, say: Say) -> Channel:
    end = time.monotonic() + MEET_WITHIN_S
    said = False
    while True:
        try:
            return Channel(socket.create_connection(route.rendezvous, timeout=_RETRY_S * 4))
        except OSError as error:
            if time.monotonic() > end:
                raise SiteError(
                    f"cluster.rendezvous={route.shown}: nobody has answered there for {MEET_WITHIN_S // 60} minutes "
                    f"({error.strerror or error}).\n  Type the same command on the host that has this address."
                ) from None
        if not said:
            said = True
            say(f"waiting for {route.shown}")
        time.sleep(_RETRY_S)


def _answer(channel: Channel, word: str, seconds: float) -> Message:
    message = channel.next(seconds)
    if message is not None and "refused" in message:
        raise SiteError(str(message["refused"]))
    if message is None or word not in message:
        raise SiteError(f"The first host ({channel.peer}) left before the job began. Nothing was started.")
    return message


def _common_run(own: RunInfo, given: Any) -> RunInfo:
    name = str(given["name"])
    if not re.fullmatch(r"[\w=,+][\w.=,+-]*", name):  # it becomes a directory's name
        raise SiteError(f"The first host calls the run {name!r}, which is no name of a run.")
    directory = Path(own.dir).parent / name
    return dataclasses.replace(own, name=name, id=str(given["id"]), created=str(given["created"]), dir=str(directory))


def _placed(plan: P, run: RunInfo, place: Place) -> P:
    return dataclasses.replace(plan, run=run, cluster=dataclasses.replace(plan.cluster, place=place))


def _make_directory(plan: P, config_yaml: str) -> tuple[P, bool]:
    """Make the run's directory, unless another host has made it on a shared disk.

    Returns:
        The plan, and True if the directory was made here.
    """
    try:
        local.create(plan, config_yaml)
    except SiteError:
        if not _is_of_this_run(plan):
            raise
        assert plan.cluster.place is not None
        plan = _placed(plan, plan.run, dataclasses.replace(plan.cluster.place, shared=True))
        plan.save()
        return plan, False
    write_text(plan.paths.plan, plan.to_json() + "\n")  # without a shared disk this directory needs its own
    return plan, True


def _is_of_this_run(plan: LaunchPlan) -> bool:
    try:  # another host that shares the disk may be about to write it
        fields = wait_until(lambda: read_json(plan.paths.plan), within_s=2)
    except OSError:  # run.dir is a file, or cannot be read
        return False
    return fields is not None and fields.get("run", {}).get("id") == plan.run.id
