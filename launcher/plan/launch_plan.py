"""LaunchPlan: where and how a job runs, with or without the engine."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from launcher.config.added_groups import added_groups, group_name
from launcher.config.schema import ContainerRuntime, Device
from launcher.errors import ConfigError, SiteError, UserError
from launcher.rundir.files import read_bytes, value_from_json, write_text
from launcher.rundir.paths import RunPaths

PLAN_FORMAT = 1

Kind = TypeVar("Kind")


class NodeRange(NamedTuple):
    """Allowed numbers of hosts; both ends are equal if the number is fixed."""

    least: int
    most: int

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    @property
    def text(self) -> str:
        return str(self.most) if self.fixed else f"{self.least} to {self.most}"


def node_range(nodes: int | str) -> NodeRange:
    """Parse ``cluster.nodes``: a number, or ``"MIN:MAX"``.

    Raises:
        ConfigError: neither form, below 1, or MIN above MAX.
    """
    match = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", str(nodes))
    if match is None:
        raise ConfigError(
            "cluster.nodes", nodes, "is not a number of hosts.", "Write a number, or MIN:MAX such as cluster.nodes=2:4."
        )
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ConfigError("cluster.nodes", nodes, "must be at least 1.")
    if least > most:
        raise ConfigError(
            "cluster.nodes", nodes, f"the minimum {least} is above the maximum {most}.",
            f"Write cluster.nodes={most}:{least}.",
        )  # fmt: skip
    return NodeRange(least, most)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Identity of a run.

    Attributes:
        id: constant for the run's life, also W&B's id.
        dir: absolute path.
        created: ISO 8601, UTC.
        version: the launcher's.
    """

    name: str
    id: str
    dir: str
    created: str
    version: str


@dataclass(frozen=True, kw_only=True)
class HostPosition:
    """This host's position among several.

    Attributes:
        node: its number; 0 owns the rendezvous address.
        address, interface: its own address that the others reach, and the network interface with that address.
        store: HOST:PORT of the store that the agents share.
        shared: whether it sees node 0's run directory.
    """

    node: int
    address: str
    interface: str
    store: str
    shared: bool


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """Slurm submission options.

    Attributes:
        options: long sbatch options; True for one without a value. Includes options of the container.
        setup: shell lines.
        cpus_per_node: cores.
        signal_s: seconds before the time limit at which SIGUSR2 requests a checkpoint.
        container: image that the tasks run in; None: no container.
        container_runtime: what starts the container.
    """

    options: dict[str, Any]
    setup: tuple[str, ...]
    cpus_per_node: int
    signal_s: int
    container: str | None
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Hosts, ranks and devices of a job.

    Attributes:
        nodes: hosts in this plan.
        min_nodes: fewest hosts with which the job continues; None if the number is fixed.
        place: None for a job on one host, and before the hosts have met.
        device: cpu or cuda, never auto.
        grace_s: seconds.
        cwd: directory in which the user typed the command.
        import_from: directories of the user's modules.
        gpu: name of the GPU that the plan is for, in the table of GPUs; None: that of this machine.
        price_per_gpu_hour: price of a rank's device, in any currency; None: reports show no cost.
    """

    kind: str
    nodes: int
    rendezvous: str | None
    interface: str | None
    place: HostPosition | None
    workers_per_node: int
    device: Device
    max_restarts: int
    grace_s: int
    cwd: str
    import_from: tuple[str, ...]
    slurm: SlurmPlan | None
    min_nodes: int | None = None
    gpu: str | None = None
    price_per_gpu_hour: float | None = None

    @property
    def copies(self) -> tuple[str, ...]:
        """Return the directories with copies of the user's code; none if the code is used in place."""
        return () if self.import_from == (self.cwd,) else self.import_from

    @property
    def range(self) -> NodeRange:
        """Return the numbers of hosts that the job may have."""
        return NodeRange(self.min_nodes or self.nodes, self.nodes)

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all hosts."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, kw_only=True)
class EnvPlan:
    """Variables of the workers beside those of the job on their node.

    Attributes:
        default: values of variables that the user's environment does not set.
        set: values that override the user's environment.
    """

    default: dict[str, str]
    set: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class SitesPlan:
    """Groups of adjacent ranks, at least 2, that take optimizer steps on their own: the sites of outer steps.

    Attributes:
        key, value: config key and its value that divide the job.
        text: description for the plan.
        connect: "package.module:function" of (world, plan), which returns the sites as a rank sees them; see
            ``launcher.train.sites``.
    """

    key: str
    value: str
    count: int
    text: str
    connect: str

    def refuse(self, why: str, remedy: str = "Leave it out.") -> None:
        """Raise ConfigError: what the user wants is not possible with sites."""
        raise ConfigError(self.key, self.value, why, remedy)


class AddedKeys:
    """Base class of what has the values of the config groups that packages add.

    Attributes:
        added: by group and field.
    """

    added: dict[str, dict[str, Any]]

    def extension(self, kind: type[Kind]) -> Kind:
        """Return the keys of the added config group with the dataclass ``kind``; its defaults if there are none.

        Raises:
            SiteError: no package installed here adds this group, and the plan has groups that are missing here.
        """
        name, lost = group_name(kind), sorted(self.added.keys() - added_groups().keys())
        if lost and not name:
            raise SiteError(
                f"{kind.__module__}: no package installed here adds its config group; the plan has {', '.join(lost)}.\n"
                "  Install its package on every node, and again after a change of its entry points."
            )
        return value_from_json(kind, self.added.get(name, {}))


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(AddedKeys):
    """Everything that a node agent needs to run any job.

    Attributes:
        command: Python's arguments in each worker; training runs append the path of the plan.
        added: values of the config groups that other packages add, by group and field; see ``extension``.
        notify: where messages about the run's outcome are sent; see ``launcher.plan.callback_plan.notify_entries``.
    """

    format: int
    run: RunInfo
    cluster: ClusterPlan
    env: EnvPlan
    command: tuple[str, ...]
    notify: tuple[str, ...] = ()
    added: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run.dir))

    @property
    def node(self) -> int:
        """Return the number of the host that this plan belongs to."""
        return 0 if self.cluster.place is None else self.cluster.place.node

    def on(self, nodes: int) -> Self:
        """Return the plan of this job on ``nodes`` hosts.

        Raises:
            UserError: the job was not planned for this number.
        """
        planned = self.cluster.range
        if not planned.least <= nodes <= planned.most:
            raise UserError(f"The job has {nodes} hosts, but was planned for {planned.text} (cluster.nodes).")
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, nodes=nodes))

    def at(self, place: HostPosition) -> Self:
        """Return the plan of this job for the host with this position."""
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, place=place))

    def as_run(self, run: RunInfo) -> Self:
        """Return this plan for another run, whose name is also that of its Slurm job."""
        cluster = self.cluster
        if cluster.slurm is not None:
            options = cluster.slurm.options | {"job-name": run.name}
            cluster = dataclasses.replace(cluster, slurm=dataclasses.replace(cluster.slurm, options=options))
        return dataclasses.replace(self, run=run, cluster=cluster)

    def worlds(self) -> list[Self]:
        """Return the plan for each number of hosts that the job may have, the largest first."""
        least, most = self.cluster.range
        return [self.on(nodes) for nodes in range(most, least - 1, -1)]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the plan in ``text``.

        Raises:
            UserError: not a plan, a plan of another version of the launcher, or one with a value that no package
                installed here adds.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != PLAN_FORMAT:  # pyright: ignore[reportUnknownMemberType]
            raise UserError(
                f"plan.json does not have format {PLAN_FORMAT}: another version of launcher wrote it.\n"
                "  Use that version."
            )
        try:
            return value_from_json(cls, fields, exact=True)
        except (KeyError, TypeError) as error:
            problem = (
                f"lacks the key {error}" if isinstance(error, KeyError) else f"has a value of another kind: {error}"
            )
            raise UserError(
                f"plan.json {problem}: another version of launcher wrote it, or the file was changed.\n  Use the "
                "version that planned the run, or restore the file; or start a new run with this version: launch train."
            ) from None
        except ValueError as error:  # from an enumeration
            raise SiteError(
                f"plan.json: {error}, as no package installed here adds it.\n  Install the package that does, as "
                "where the run was planned, on every node."
            ) from None

    def save(self) -> None:
        write_text(self.paths.plan_of(self.node), self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.from_json(read_bytes(path))
