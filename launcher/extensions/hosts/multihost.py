"""Several hosts without a scheduler: the same command is typed on each, and they meet at an address of one of them.

The host that owns the address is node 0. It waits there for the others, checks that all were given the same job, and
sends each the run's name and id and a node number. No worker starts before every host has its directory.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import socket
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import launcher
from launcher.config.schema import ClusterConfig, groups_without_effect
from launcher.errors import ConfigError, SiteError, UserError
from launcher.extensions.hosts.channel import PROTOCOL, Channel, Listener, Message, wait
from launcher.extensions.hosts.peers import FirstHost, OtherHost
from launcher.launch.network import Route, endpoint, find_route, free_port, interface_env, interfaces
from launcher.plan.clusters import Cluster, Create, P, Peers, Say
from launcher.plan.host import without_secrets
from launcher.plan.launch_plan import HostPosition, LaunchPlan, NodeRange, RunInfo
from launcher.plan.run_plan import RunPlan, part
from launcher.process import wait_until
from launcher.quantities import count, first_lines
from launcher.rundir.files import read_json, write_text

# seconds that node 0 waits for the others, and every other host for node 0
MEET_WITHIN_S = 600
# seconds that node 0 waits for one more host once enough have arrived
SETTLE_S = 30
_ANSWER_WITHIN_S = 60
_REACH_WITHIN_S = 5.0
_CONNECT_WITHIN_S, _RETRY_S = 2.0, 0.5


class HostsCluster(Cluster):
    """Several hosts without a scheduler."""

    typed_on_each_host = True
    takes = frozenset({"rendezvous", "interface"})

    def check(self, config: ClusterConfig, nodes: NodeRange) -> None:
        if nodes.most < 2:
            raise ConfigError(
                "cluster.nodes", config.nodes, "cluster=hosts is a job over several machines.",
                "Use cluster.nodes=2 or more, or cluster=local.",
            )  # fmt: skip
        if config.rendezvous is None:
            raise ConfigError(
                "cluster.rendezvous", None, "is required with cluster=hosts.",
                "Set cluster.rendezvous=HOST:PORT, an address of the first host and a free port, the same on every "
                "host.",
            )  # fmt: skip
        endpoint(config.rendezvous)

    def start(self, plan: P, create: Create, run_name: str | None, say: Say) -> tuple[P, Peers]:
        """Meet the other hosts and make the run's directory.

        Raises:
            SiteError: There is no route to the others, too few came in time, or one host cannot make the directory.
            UserError: The hosts were not given the same job. Every host gets the same message.
        """
        assert plan.cluster.rendezvous is not None
        route = find_route(plan.cluster.rendezvous, plan.cluster.interface)
        names = interface_env(route, plan.cluster.interface)
        plan = dataclasses.replace(plan, env=dataclasses.replace(plan.env, default=names | plan.env.default))
        return (lead if route.here else join_node_0)(plan, create, route, job_facts(plan, run_name), say)


@dataclass
class _Gathering:
    """Node 0's wait for the other hosts. ``channels``: connections to those that are there, in order of arrival."""

    listener: Listener
    allowed: NodeRange
    facts: Message
    route: Route
    say: Say
    channels: list[Channel] = field(default_factory=list[Channel])

    def wait(self) -> None:
        """Wait until all allowed hosts are there, or enough of them and no other one arrives for SETTLE_S.

        Raises:
            UserError: A host was not given the same job.
            SiteError: Too few hosts came within MEET_WITHIN_S.
        """
        allowed, shown = self.allowed, self.route.shown
        self.say(f"This is node 0 of {allowed.text}, waiting at {shown} for the others.")
        start = last_change = time.monotonic()
        announced = 0
        while (hosts := len(self.channels) + 1) < allowed.most:
            if hosts >= allowed.least:
                if announced != hosts:
                    announced = hosts
                    be = "is" if hosts == 1 else "are"
                    self.say(f"{count(hosts, 'host')} {be} enough: waiting {SETTLE_S} s for one more.")
                if time.monotonic() - last_change >= SETTLE_S:
                    return
            elif time.monotonic() - start > MEET_WITHIN_S:
                typed = allowed.most if allowed.fixed else f"{allowed.least}:{allowed.most}"
                raise SiteError(
                    f"cluster.nodes={typed}: {hosts} of {allowed.text} hosts connected to {shown} within "
                    f"{MEET_WITHIN_S // 60} minutes.\n  Type the same command on each of them."
                )
            wait([*self.listener.sources(), *self.channels], 1.0)
            if self._update():
                last_change, announced = time.monotonic(), 0

    def _update(self) -> bool:
        """Add hosts that arrived and remove hosts that left. Return True if any did."""
        before = list(self.channels)
        for channel, hello in self.listener.arrivals():
            if len(self.channels) == self.allowed.most - 1:
                full = f"all {self.allowed.most} hosts have arrived already."
                channel.send(refused=f"cluster.rendezvous={self.route.shown}: {full}")
                channel.close()
                continue
            self.channels.append(channel)
            differing = differences(self.facts, hello.get("facts"), self.route.rendezvous[0], channel.peer)
            if differing:
                raise UserError(differing)
            self.say(f"{channel.peer} has joined: {len(self.channels) + 1} of {self.allowed.text} hosts.")
        for channel in self.channels.copy():
            if channel.receive() or not channel.open:
                channel.close()
                self.channels.remove(channel)
                self.say(f"{channel.peer} has disconnected.")
        return self.channels != before


def lead(plan: P, create: Create, route: Route, facts: Message, say: Say) -> tuple[P, Peers]:
    """Gather the other hosts as node 0."""
    try:
        listener = Listener(route.rendezvous)
    except OSError as error:
        raise SiteError(
            f"cluster.rendezvous={route.shown}: cannot listen there: {error.strerror}.\n"
            "  Another job or program has the port: choose another one."
        ) from None
    gathering = _Gathering(listener, plan.cluster.range, facts, route, say)
    channels, address, created = gathering.channels, route.interface.address, False
    try:
        gathering.wait()
        store = f"{address}:{free_port(address)}"
        own = HostPosition(node=0, address=address, interface=route.interface.name, store=store, shared=True)
        plan = plan.on(len(channels) + 1).at(own)
        create(plan)
        created = True
        run = {"name": plan.run.name, "id": plan.run.id, "created": plan.run.created}
        for node, channel in enumerate(channels, 1):
            channel.send(welcome=run, node=node, nodes=plan.cluster.nodes, store=store)
        _require_ready(channels, plan, route.rendezvous[1])
        for channel in channels:
            channel.send(go=True)
    except BaseException as error:
        if isinstance(error, UserError):
            for channel in channels:
                channel.send(refused=str(error))
        _undo(plan, created, listener, *channels)
        raise
    # without checkpoints the run ends with the loss of a host
    least = plan.cluster.min_nodes if isinstance(plan, RunPlan) and plan.checkpoint.enabled else None
    return plan, FirstHost(listener, channels, address, _refusal(plan, route), least)


def _undo(plan: LaunchPlan, created: bool, *connections: Listener | Channel) -> None:
    """Close the connections, and remove the run's directory if this host made it."""
    for connection in connections:
        connection.close()
    if created:
        shutil.rmtree(plan.paths.root, ignore_errors=True)


def _refusal(plan: LaunchPlan, route: Route) -> str:
    """Return the message for a host that comes when the run has started."""
    fixed = plan.cluster.min_nodes is None
    why = f"has all its {plan.cluster.nodes} hosts" if fixed else "is under way, and no host can join it"
    return (
        f"cluster.rendezvous={route.shown}: the run there, {plan.run.name}, {why}.\n"
        "  For a job of its own, choose another port or another first host."
    )


def _require_ready(channels: list[Channel], plan: LaunchPlan, port: int) -> None:
    """Check that every host has made its directory and can be reached at its workers' address. Raises SiteError."""
    for node, channel in enumerate(channels, 1):
        host = f"node {node} ({channel.peer})"
        answer = channel.next(_ANSWER_WITHIN_S)
        if answer is None:
            raise SiteError(f"{host} left before the job began. Nothing was started.")
        if "refused" in answer:
            raise SiteError(f"on {host}: {answer['refused']}")
        require_reach(str(answer.get("address", channel.peer)), port, host)
        if isinstance(plan, RunPlan) and plan.checkpoint.enabled and not answer.get("shared"):
            raise SiteError(
                f"checkpoint.enabled=true: {host} does not see {plan.run.dir} of node 0, and the parts of a checkpoint "
                "would be stored on different hosts.\n  Use a run.dir on a disk that all of them share, or "
                "checkpoint.enabled=false."
            )


def require_reach(address: str, port: int, whose: str) -> None:
    """Check that this host can connect to ``address``; a refused connection passes, as it shows that the host is there.

    Args:
        whose: description of the host that announced ``address`` as its own.

    Raises:
        SiteError: The host cannot be reached, or ``address`` belongs to this host too.
    """
    problem = ""
    try:
        socket.create_connection((address, port), timeout=_REACH_WITHIN_S).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        problem = error.strerror or str(error)
    if any(i.address == address and not i.loopback for i in interfaces()):
        problem = "it is an address of this host too"
    if problem:
        raise SiteError(
            f"cluster.interface: {socket.gethostname()} does not reach {address}, the address of {whose}: "
            f"{problem}.\n  Set cluster.interface there to the one that leads to the other hosts."
        )


def join_node_0(plan: P, create: Create, route: Route, facts: Message, say: Say) -> tuple[P, Peers]:
    """Connect this host, which is not node 0, to node 0; return the plan for it and the connection to the others."""
    channel, created = _connect(route, say), False
    try:
        channel.send(launch=PROTOCOL, facts=facts)
        greeting = channel.next(_ANSWER_WITHIN_S)
        if greeting is None or greeting.get("launch") != PROTOCOL:
            raise SiteError(
                f"cluster.rendezvous={route.shown}: the program there is not a `launch` of this version that waits for "
                "hosts.\n  Start it on the first host as here, or choose a port that nothing else uses."
            )
        welcome = _expect(channel, "welcome", MEET_WITHIN_S)
        place = HostPosition(
            node=int(welcome["node"]), address=route.interface.address, interface=route.interface.name,
            store=str(welcome["store"]), shared=False,
        )  # fmt: skip
        try:
            require_reach(place.store.rpartition(":")[0], route.rendezvous[1], "node 0")
            run = _common_run(plan.run, welcome["welcome"])
            plan = dataclasses.replace(plan.on(int(welcome["nodes"])).at(place), run=run)
            plan, created = _make_directory(plan, create)
        except SiteError as error:
            channel.send(refused=str(error))
            raise
        channel.send(ready=True, shared=not created, address=place.address)
        _expect(channel, "go", _ANSWER_WITHIN_S + MEET_WITHIN_S)
    except BaseException:
        _undo(plan, created, channel)
        raise
    return plan, OtherHost(channel)


def _connect(route: Route, say: Say) -> Channel:
    """Connect to node 0, which may start later.

    Raises:
        SiteError: It does not answer within MEET_WITHIN_S.
    """
    problem: OSError | None = None

    def attempt() -> socket.socket | None:
        nonlocal problem
        try:
            return socket.create_connection(route.rendezvous, timeout=_CONNECT_WITHIN_S)
        except OSError as error:
            problem = error
            return None

    connection = attempt()
    if connection is None:
        say(f"waiting for {route.shown}")
        connection = wait_until(attempt, MEET_WITHIN_S, _RETRY_S)
    if connection is None:
        raise SiteError(
            f"cluster.rendezvous={route.shown}: no answer within {MEET_WITHIN_S // 60} minutes "
            f"({(problem and problem.strerror) or problem}).\n"
            "  Type the same command on the host that has this address."
        )
    return Channel(connection)


def _expect(channel: Channel, key: str, seconds: float) -> Message:
    """Return node 0's next message, which must contain ``key``. Raises SiteError if it does not."""
    message = channel.next(seconds)
    if message is not None and "refused" in message:
        raise SiteError(str(message["refused"]))
    if message is None or key not in message:
        raise SiteError(f"The first host ({channel.peer}) left before the job began. Nothing was started.")
    return message


def _common_run(own: RunInfo, message: Any) -> RunInfo:
    name = str(message["name"])
    if not re.fullmatch(r"[\w=,+][\w.=,+-]*", name):  # it becomes a directory's name
        raise SiteError(f"The first host sent the run name {name!r}, which is not valid.")
    directory = Path(own.dir).parent / name
    return dataclasses.replace(
        own, name=name, id=str(message["id"]), created=str(message["created"]), dir=str(directory)
    )


def _make_directory(plan: P, create: Create) -> tuple[P, bool]:
    """Make the run's directory, unless another host has made it on a shared disk.

    Returns:
        The plan, and True if the directory was made here.
    """
    try:
        create(plan)
    except SiteError:
        if not _is_of_this_run(plan):
            raise
        assert plan.cluster.place is not None
        plan = plan.at(dataclasses.replace(plan.cluster.place, shared=True))
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


# not compared: values of one host, and what affects records outside the run only
_OWN = (
    "run.name", "run.dir", "cluster.interface", "cluster.rendezvous", "cluster.price_per_gpu_hour",
    *groups_without_effect(),
)  # fmt: skip
_NOT_OF_TASK = ("target", "params", "flops_per_sample")  # keys of the config, and what is derived
_LINES = 12


def job_facts(plan: LaunchPlan, run_name: str | None) -> Message:
    """Return, by config key, every value of ``plan`` that decides what is computed, and the versions."""
    facts: Message = {key: value for key, value in part(plan).items() if not key.startswith(_OWN)}
    facts |= {"run.name": run_name, "cluster.nodes (the fewest)": plan.cluster.min_nodes, "command": [*plan.command]}
    if isinstance(plan, RunPlan):  # everything else in the plans for fewer hosts is derived
        facts |= {f"strategy.sync on {world.nodes} hosts": world.strategy.sync.value for world in plan.fewer}
        facts["weights in checkpoint.init_from"] = plan.initial and plan.initial.digest
        described = {name: value for name, value in asdict(plan.task).items() if name not in _NOT_OF_TASK}
        facts |= {f"the task's {name}": value for name, value in json.loads(json.dumps(described)).items()}
    facts |= {"version of launcher": launcher.__version__, "version of torch": metadata.version("torch")}
    facts["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return facts


def differences(here: Message, there: Any, host: str, other: str) -> str:
    """Return a message with all values that differ; empty if none does. ``there``: facts as received from ``other``."""
    if not isinstance(there, dict):
        return f"{other} sent no description of its job. Nothing was started."
    theirs = cast(Message, there)
    missing = "nothing"
    lines = [
        f"{key}: {_shown(key, here.get(key, missing))} on {host}, {_shown(key, theirs.get(key, missing))} on {other}"
        for key in sorted({*here, *theirs})
        if here.get(key, missing) != theirs.get(key, missing)
    ]
    if not lines:
        return ""
    head = "The hosts were not given the same job. Nothing was started."
    remedy = "Type the same command on every host, where the same code and data are."
    return "\n  ".join([head, *first_lines(lines, _LINES), remedy])


def _shown(key: str, value: Any) -> str:
    value = without_secrets(value, key)
    return value if isinstance(value, str) else json.dumps(value)
