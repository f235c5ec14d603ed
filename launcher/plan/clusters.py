"""Kinds of clusters: the core's, and those that installed packages add by the entry point ``launcher.clusters``.

An entry point ``KIND = "package.module:Class"`` names a subclass of ``Cluster``, which ``cluster=KIND`` chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, TypeVar

from launcher.config.schema import ClusterConfig, ClusterKind, without_effect
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.launch_plan import LaunchPlan, NodeRange
from launcher.targets import load_entry_point, present_entry_points

GROUP = "launcher.clusters"
P = TypeVar("P", bound=LaunchPlan)
Say = Callable[[str], None]
Create = Callable[[LaunchPlan], None]


@dataclass(frozen=True)
class Regrouping:
    """Continuation of a job without the hosts that are gone, for one of the hosts that are left.

    Args:
        node: new number of this host.
        nodes: number of hosts left.
        store: HOST:PORT of the agents' new store.
        lost: hosts that are gone, by their old numbers.
    """

    node: int
    nodes: int
    store: str
    lost: str


class Peers:
    """The other hosts, as one host sees them. This base class is that of a job on one host.

    Attributes:
        stopped_by: host on which the job was stopped, if another one.
        trouble: what ended the job on another host.
        lost: True if a host is gone; then waiting for the workers is useless.
    """

    def __init__(self) -> None:
        self._summary: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._stopped = False
        self.stopped_by: str | None = None
        self.trouble: str | None = None
        self.lost = False

    def listen(self, seconds: float) -> None:
        """Receive messages for at most ``seconds``."""
        time.sleep(seconds)

    def stop(self, by: str) -> None:
        """Report that the job was stopped on this host. ``by``: Ctrl-C, or the name of a signal."""

    def ended(self, summary: dict[str, Any]) -> None:
        """Report that this host's agent has ended."""
        self._summary = summary

    def complete(self) -> bool:
        """Return True if the verdict of the whole job is known."""
        return True

    def regroup(self) -> Regrouping | None:
        """Return how this host continues after the loss of another one; None if the job is over.

        Call it once ``complete`` is true.
        """
        return None

    def start_regrouped(self) -> None:
        """Start the regrouped job: node 0 lets the other hosts begin."""

    def conclude(self) -> dict[str, Any]:
        """Return the summary of the whole job, as far as known, and close the connections."""
        return self._summary


class Cluster:
    """Kind of cluster. This base class is that of a job which one command starts: on one machine, or by a scheduler.

    Attributes:
        typed_on_each_host: the user types the command on each host; nothing else can start or restart the job there.
        takes: which of the keys ``cluster.rendezvous`` and ``cluster.interface`` have an effect with this kind.
    """

    typed_on_each_host: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()

    def check(self, config: ClusterConfig, nodes: NodeRange) -> None:
        """Raise ConfigError if the kind cannot have these hosts."""

    def start(self, plan: P, create: Create, run_name: str | None, say: Say) -> tuple[P, Peers]:  # noqa: ARG002
        """Meet the other hosts, if they start by themselves, and make the run's directory.

        Args:
            plan: plan that this host made by itself.
            create: makes the run's directory on this host, with its plan and config.
            run_name: run.name as the user set it, or None.
            say: shows one line to the user.

        Returns:
            The plan of this host in the run, and the connection to the others.

        Raises:
            SiteError, UserError: the job cannot start.
        """
        create(plan)
        return plan, Peers()


class _Local(Cluster):
    def check(self, config: ClusterConfig, nodes: NodeRange) -> None:
        if nodes != (1, 1):
            raise ConfigError(
                "cluster.nodes", config.nodes, "cluster=local is one machine.",
                f"Use cluster.nodes=1; for several: {for_several()}.",
            )  # fmt: skip


class _Slurm(Cluster):
    takes = frozenset({"interface"})


# elsewhere: only for `launch plan`
_CORE = {ClusterKind.local: _Local, ClusterKind.slurm: _Slurm, ClusterKind.elsewhere: Cluster}


@cache
def _added() -> dict[str, EntryPoint]:
    """Return the entry point of each kind that an installed package adds; the core's cannot be replaced."""
    return {kind: point for kind, point in present_entry_points(GROUP).items() if kind not in _CORE}


def cluster_of(kind: str) -> Cluster:
    """Return the cluster of a kind.

    Raises:
        ConfigError: none of this kind is installed.
        SiteError: it cannot be imported.
    """
    if kind in _CORE:
        return _CORE[ClusterKind(kind)]()
    if kind not in _added():
        names = [*_CORE, *_added()]
        likely = did_you_mean(kind, names)
        raise ConfigError(
            "cluster.kind", kind, "no cluster of this kind is installed.", f"{likely}Installed: {', '.join(names)}."
        )
    return load_entry_point(_added()[kind], f"cluster={kind}")()


def for_several() -> str:
    """Return the ways to use several hosts, for a message."""
    added = " or ".join(f"cluster={kind}" for kind in _added())
    return f"cluster=slurm{f', or {added} where there is no scheduler' if added else ''}"


def require_at_hand(cluster: ClusterConfig) -> None:
    """Refuse machines that are not at hand, for all but `launch plan`: ``cluster.gpu`` and ``cluster=elsewhere``.

    Raises:
        ConfigError: the job is for such machines.
    """
    if cluster.gpu is not None:
        raise ConfigError(
            "cluster.gpu", cluster.gpu, "is for `launch plan`: a job runs on the GPUs that its hosts have.",
            "Leave it out.",
        )  # fmt: skip
    if cluster.kind == ClusterKind.elsewhere:
        raise ConfigError(
            "cluster", "elsewhere", "is for `launch plan`: nothing can be started on hosts that are not at hand.",
            f"Use {for_several()}.",
        )  # fmt: skip


def typed_kinds() -> list[str]:
    """Return the installed kinds whose command the user types on each host."""
    return [kind for kind in sorted(_added()) if cluster_of(kind).typed_on_each_host]


def require_effect(config: ClusterConfig) -> None:
    """Raise ConfigError for a key of the group ``cluster`` that the kind does not take."""
    for name in ("rendezvous", "interface"):
        value = getattr(config, name)
        if value is not None and name not in cluster_of(config.kind).takes:
            kinds = [kind for kind in (*_added(), *_CORE) if name in cluster_of(kind).takes]
            raise without_effect(f"cluster.{name}", value, f"cluster={config.kind}", f"cluster={' or '.join(kinds)}")
