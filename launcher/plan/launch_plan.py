"""LaunchPlan: where and how a job runs, with or without the engine."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.config.schema import ClusterKind, Device
from launcher.errors import UserError
from launcher.plan.worlds import NodeRange
from launcher.rundir.files import build, write_text
from launcher.rundir.paths import RunPaths

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """``id``: fixed for the run's life, W&B's too. ``dir``: absolute. ``created``: ISO 8601, UTC."""

    name: str
    id: str
    dir: str
    created: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """This host among several. ``node``: its number, 0 for the one that owns the rendezvous address. ``address``: its
    own, that the others reach; ``interface``: which has it. ``store``: HOST:PORT where the agents share what they know.
    ``shared``: whether it sees the run's directory of node 0."""

    node: int
    address: str
    interface: str
    store: str
    shared: bool


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """What Slurm is asked for. ``options``: of sbatch, by their long names; true for one without a value. ``setup``:
    shell lines. ``cpus_per_node``: cores. ``signal_s``: seconds before the time limit at which SIGUSR2 comes, to save.
    ``container``: image that the tasks run in, None for none; its further options are among ``options``."""

    options: dict[str, Any]
    setup: tuple[str, ...]
    cpus_per_node: int
    signal_s: int
    container: str | None


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """``nodes``: hosts in this plan; ``min_nodes``: the fewest that the job goes on with, None where that is fixed.
    ``device``: cpu or cuda, never auto. ``cwd``: where the user typed the command. ``import_from``: directories with
    the user's modules. ``grace_s``: seconds. ``place``: None for a job on one host, and until the hosts have met.
    ``link_gbit``: Gbit/s of a host's link, if that was said."""

    kind: ClusterKind
    nodes: int
    rendezvous: str | None
    interface: str | None
    link_gbit: float | None
    place: Place | None
    workers_per_node: int
    device: Device
    max_restarts: int
    grace_s: int
    cwd: str
    import_from: tuple[str, ...]
    slurm: SlurmPlan | None
    min_nodes: int | None = None

    @property
    def copies(self) -> tuple[str, ...]:
        """Of the user's code; none where it is run as it lies."""
        return () if self.import_from == (self.cwd,) else self.import_from

    @property
    def range(self) -> NodeRange:
        """Hosts that the job may have."""
        return NodeRange(self.min_nodes or self.nodes, self.nodes)

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, kw_only=True)
class EnvPlan:
    """``allow``: names, with a trailing * for any ending, that workers inherit. ``default``: for what the user's
    environment leaves open. ``set``: whatever it says."""

    allow: tuple[str, ...]
    default: dict[str, str]
    set: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a node agent needs to run any job. ``command``: the arguments of Python in each worker; those of a training
    run get the plan's path after it."""

    format: int
    run: RunInfo
    cluster: ClusterPlan
    env: EnvPlan
    command: tuple[str, ...]

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run.dir))

    @property
    def node(self) -> int:
        """The number of the host that this plan is of."""
        return 0 if self.cluster.place is None else self.cluster.place.node

    def on(self, nodes: int) -> Self:
        """The plan of this job on ``nodes`` hosts.

        Raises:
            UserError: it was not planned for so many.
        """
        planned = self.cluster.range
        if not planned.least <= nodes <= planned.most:
            raise UserError(f"The job has {nodes} hosts, and was planned for {planned.words} (cluster.nodes).")
        return dataclasses.replace(self, cluster=dataclasses.replace(self.cluster, nodes=nodes))

    def worlds(self) -> list[Self]:
        """The plan on each number of hosts that the job may have, the most first."""
        least, most = self.cluster.range
        return [self.on(nodes) for nodes in range(most, least - 1, -1)]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises UserError for a plan of another format, or one that is no plan."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
            raise UserError(f"plan.json has not format {FORMAT}: it was written by another version of launcher.")
        return build(cls, fields)

    def save(self) -> None:
        write_text(self.paths.plan_of(self.node), self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.from_json(path.read_text(encoding="utf-8"))
