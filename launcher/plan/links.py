"""Links between ranks: how long a collective takes inside a host and between hosts.

A model of latency and bandwidth with two levels. A ring of W ranks passes an all-gather or a reduce-scatter on in W-1
steps, in which each rank sends (W-1)/W of the payload; an all-reduce is both (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009; Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005). Steps are pipelined, so the slowest link of the ring sets the rate.

Ranks are numbered host by host. A ring then leaves each host once, so the host's link carries what one rank sends, for
each group that has such a ring. NCCL runs several rings over all network adapters of a host, which together are its
link, and takes a tree for an all-reduce where the tree is faster (NCCL, src/graph/tuning.cc). gloo runs an all-reduce
as a ring and a broadcast as a binomial tree; on CPUs the launcher itself runs all-gathers and reduce-scatters, in which
each rank sends every other rank its part directly (train/parallel/collectives.py).
"""

from __future__ import annotations

import dataclasses
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import ClusterKind, Device
from launcher.plan.forecast_cache import ContentCache, locked, user_cache
from launcher.plan.gpus import Gpu, find_gpu
from launcher.plan.launch_plan import ClusterPlan
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from launcher.rundir.files import value_from_json

# Shares of a data sheet's rate that a collective reaches, in NCCL's own model (src/graph/topo.h): 20 of 25 GB/s of an
# NVLink, 12 of 16 GB/s of PCIe Gen3 x16, 12 of 12.5 GB/s of a network adapter of 100 Gbit/s. A plain TCP stream has
# reached 97 to 98% of a shaped link of 0.1 and 1 Gbit/s (docs/explanations/sync.md).
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.8, 0.75, 0.96
# Seconds of one step of NCCL's ring with the protocol LL128 (src/graph/tuning.cc, hwLat)
_NVLINK_STEP_S, _PCIE_STEP_S, _NCCL_NETWORK_STEP_S = 1.9e-6, 2.5e-6, 4.0e-6
# CPU hosts that nobody has measured: what gloo reached on two cores of an AMD EPYC, to an order of magnitude
_GLOO_STEP_S, _GLOO_NETWORK_STEP_S, _GLOO_BYTES_PER_S = 1e-4, 2e-4, 1e9
_SHEET_ERROR, _PCIE_ERROR, _ASSUMED_ERROR = 0.2, 0.3, 0.5


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Latency and bandwidth of one kind of collective on one level; see ``Level``."""

    kind: Collective
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links of one level.

    Attributes:
        latency_s: seconds of one step of a collective, without its bytes.
        bytes_per_s: each direction. Inside a host: what each rank sends while all ranks of the host do. Between hosts:
            what the link of a host carries for all its ranks together.
        error: relative half width of a 90% interval of predicted times.
        own: values of kinds of collectives that were measured to differ.
    """

    latency_s: float
    bytes_per_s: float
    error: float
    own: tuple[Rate, ...] = ()

    def for_kind(self, kind: Collective) -> Level:
        """Return this level with the values of ``kind``."""
        for rate in self.own:
            if rate.kind is kind:
                return dataclasses.replace(self, latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s, own=())
        return self


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links of a job.

    Attributes:
        inside: between the ranks of one host.
        between: between hosts; None if all ranks are on one host.
        gloo: collectives run as on CPUs, else as in NCCL.
        source: where the figures come from, for the plan.
    """

    inside: Level
    between: Level | None
    gloo: bool
    source: str

    def seconds(self, kind: Collective, payload_bytes: int, *, ranks: int, hosts: int, groups: int = 1) -> float:
        """Return the seconds of one collective by itself.

        Args:
            payload_bytes: what one rank hands to it, as ``Layout`` counts.
            ranks, hosts: size of the group, and number of hosts over which its ranks are spread evenly.
            groups: groups with ranks on the same host that run this collective at the same time and share the host's
                link, such as the replicas' all-reduces of HSDP: one for each worker of a host.
        """
        if ranks == 1 or payload_bytes == 0:
            return 0.0
        between = None if self.between is None else self.between.for_kind(kind)
        route = _Route(self.inside.for_kind(kind), between, ranks, hosts, groups)
        if kind is Collective.broadcast and self.gloo:
            return route.tree_broadcast(payload_bytes)
        if kind in (Collective.all_gather, Collective.reduce_scatter) and self.gloo:
            return route.exchange(payload_bytes)
        if kind is Collective.broadcast:  # the root's bytes pass through all ranks, in pieces
            return route.ring(payload_bytes, 1)
        passes = 2 if kind in (Collective.all_reduce, Collective.statistics) else 1
        whole = payload_bytes * ranks if kind is Collective.outputs else payload_bytes
        ring = route.ring(whole * (ranks - 1) / ranks, passes)
        return ring if passes == 1 or self.gloo else min(ring, route.double_tree(whole))

    def error(self, hosts: int) -> float:
        """Return the relative half width of a 90% interval of ``seconds`` for a group over ``hosts`` hosts."""
        if hosts == 1 or self.between is None:
            return self.inside.error
        return self.between.error


@dataclass(frozen=True)
class _Route:
    """Links that one group uses, and the algorithms on them; all return seconds."""

    inside: Level
    between: Level | None
    ranks: int
    hosts: int
    groups: int

    @property
    def _on_host(self) -> int:
        return -(-self.ranks // self.hosts)

    @property
    def _link(self) -> Level:
        if self.between is None:
            raise ValueError("these links are those of one host")
        return self.between

    def _steps(self, inside: int, crossing: int) -> float:
        return inside * self.inside.latency_s + (crossing * self._link.latency_s if crossing else 0.0)

    def _transfer(self, inside_bytes: float, link_bytes: float) -> float:
        """Return the seconds in which each rank sends ``inside_bytes`` within its host, while each host sends
        ``link_bytes`` for each of the groups."""
        inside_s = inside_bytes / self.inside.bytes_per_s if self._on_host > 1 else 0.0
        return max(inside_s, self.groups * link_bytes / self._link.bytes_per_s) if self.hosts > 1 else inside_s

    def ring(self, sent_bytes: float, passes: int) -> float:
        """Return the time of a ring in which each rank sends ``sent_bytes`` in each pass."""
        crossing = 0
        if self.hosts > 1:  # of each W-1 hops in a row
            crossing = passes * (self.hosts if self._on_host > 1 else self.hosts - 1)
        steps = self._steps(passes * (self.ranks - 1) - crossing, crossing)
        return steps + self._transfer(passes * sent_bytes, passes * sent_bytes)

    def double_tree(self, payload: int) -> float:
        """Return the time of an all-reduce over two binary trees, in which each host sends all of the payload once up
        and once down (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan", 2009). Inside a host NCCL's trees are chains."""
        crossing = 2 * math.ceil(math.log2(self.hosts))
        return self._steps(2 * (self._on_host - 1), crossing) + self._transfer(2 * payload, 2 * payload)

    def exchange(self, payload: int) -> float:
        """Return the time in which each rank sends each other rank one part of the payload, all at once."""
        part, on_host = payload / self.ranks, self._on_host
        latency = self._steps(0, 1) if self.hosts > 1 else self._steps(1, 0)
        return latency + self._transfer((on_host - 1) * part, on_host * (self.ranks - on_host) * part)

    def tree_broadcast(self, payload: int) -> float:
        """Return the time of a binomial tree: in round i, the first 2^i ranks send the whole payload 2^i ranks
        ahead."""
        total, on_host = 0.0, self._on_host
        for ahead in (2**i for i in range(math.ceil(math.log2(self.ranks)))):
            if ahead < on_host:
                total += self._steps(1, 0) + payload / self.inside.bytes_per_s
            else:
                total += self._steps(0, 1) + self.groups * on_host * payload / self._link.bytes_per_s
        return total


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Measurement of a cluster's links by `launch doctor`.

    Attributes:
        workers: ranks per host that took part.
        day: date of the measurement, ISO 8601.
        inside, between: None if nothing was measured there.
    """

    workers: int
    day: str
    inside: Level | None
    between: Level | None


def links_of(plan: RunPlan) -> Links | None:
    """Return the links of the plan's hosts; None if their rates are not known, or if there is only one rank.

    In order of preference: what the user states (``cluster.link_gbit``), what `launch doctor` has measured on these
    hosts, data sheets (``cluster.gpu``).
    """
    cluster = plan.cluster
    if cluster.world_size == 1:
        return None
    gpu = None if cluster.gpu is None else find_gpu(cluster.gpu)
    at_hand = gpu is None and cluster.kind is not ClusterKind.elsewhere
    measured = find_measured(cluster) if at_hand else None
    inside = between = ("", None)
    if cluster.workers_per_node > 1:
        inside = _inside(cluster, gpu, measured)
        if inside[1] is None:
            return None
    if cluster.nodes > 1:
        between = _between(cluster, gpu, measured)
        if between[1] is None:
            return None
    level = inside[1] or between[1]
    assert level is not None  # there are several ranks
    sources = [source for source in dict.fromkeys((between[0], inside[0])) if source]
    return Links(inside=level, between=between[1], gloo=cluster.device is Device.cpu, source="; ".join(sources))


def _inside(cluster: ClusterPlan, gpu: Gpu | None, measured: MeasuredLinks | None) -> tuple[str, Level | None]:
    """Return the links inside a host, and their source; data sheets state both directions together."""
    if measured is not None and measured.inside is not None:
        return _measured_on(measured), measured.inside
    if gpu is None:
        if cluster.device is not Device.cpu:
            return "", None
        level = Level(latency_s=_GLOO_STEP_S, bytes_per_s=_GLOO_BYTES_PER_S, error=_ASSUMED_ERROR)
        return f"assumed {_GLOO_BYTES_PER_S / 1e9:g} GB/s inside a host", level
    source = f"data sheet of {gpu.name}"
    if gpu.nvlink_gb_s is not None:
        rate = NVLINK_SHARE * gpu.nvlink_gb_s / 2
        return source, Level(latency_s=_NVLINK_STEP_S, bytes_per_s=rate * 1e9, error=_SHEET_ERROR)
    rate = PCIE_SHARE * gpu.pcie_gb_s / 2
    return source, Level(latency_s=_PCIE_STEP_S, bytes_per_s=rate * 1e9, error=_PCIE_ERROR)


def _between(cluster: ClusterPlan, gpu: Gpu | None, measured: MeasuredLinks | None) -> tuple[str, Level | None]:
    """Return the links between hosts, and their source."""
    found = None if measured is None else measured.between
    step_s = _GLOO_NETWORK_STEP_S if cluster.device is Device.cpu else _NCCL_NETWORK_STEP_S
    if (rate := cluster.link_gbit) is not None:
        source = f"cluster.link_gbit={rate:g}"
        if found is not None and measured is not None:
            step_s = found.latency_s
            if not 0.5 <= (share := found.bytes_per_s * 8e-9 / rate) <= 2:
                source += f", although launch doctor measured {share * rate:.3g} Gbit/s on {measured.day}"
    elif found is not None and measured is not None:
        return _measured_on(measured), found
    elif gpu is not None and gpu.nic_gbit is not None:
        rate = gpu.nic_gbit * cluster.workers_per_node
        source = f"{rate:,} Gbit/s a host: {gpu.nic_gbit} for each {gpu.name}, as in its maker's own system"
    else:
        return "", None
    return source, Level(latency_s=step_s, bytes_per_s=NETWORK_SHARE * rate * 1e9 / 8, error=_SHEET_ERROR)


def _measured_on(measured: MeasuredLinks) -> str:
    return f"measured by launch doctor on {measured.day}"


def find_measured(cluster: ClusterPlan) -> MeasuredLinks | None:
    """Return what was measured on the hosts of ``cluster`` with as many ranks per host, else with the next number."""
    entries: list[MeasuredLinks] = [
        value_from_json(MeasuredLinks, entry) for entry in ContentCache().get(_key(cluster)) or ()
    ]
    return min(entries, key=lambda entry: abs(entry.workers - cluster.workers_per_node), default=None)


def store_measured(cluster: ClusterPlan, measured: MeasuredLinks) -> None:
    """Store a measurement of the hosts of ``cluster`` for later plans. Nothing is stored if the cache is read-only."""
    cache, key = ContentCache(), _key(cluster)
    with suppress(OSError), locked(user_cache() / "links.lock"):
        entries = [entry for entry in cache.get(key) or () if entry["workers"] != measured.workers]
        cache.put(key, [dataclasses.asdict(measured), *entries], ())


def _key(cluster: ClusterPlan) -> dict[str, Any]:
    """Return what names the hosts before they have met: the first one's address, Slurm's partition, or this host."""
    hosts = {
        ClusterKind.local: os.uname().nodename,
        ClusterKind.hosts: (cluster.rendezvous or "").rpartition(":")[0],
        ClusterKind.elsewhere: "",
        ClusterKind.slurm: "" if cluster.slurm is None else str(cluster.slurm.options.get("partition", "")),
    }
    return {"links of": cluster.kind.value, "hosts": hosts[cluster.kind], "device": cluster.device.value}
