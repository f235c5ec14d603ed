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

import math
from dataclasses import dataclass

from launcher.config.schema import Device
from launcher.plan.gpus import Gpu, find_gpu
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective

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
class Level:
    """Links of one level.

    Attributes:
        latency_s: seconds of one step of a collective, without its bytes.
        bytes_per_s: each direction. Inside a host: what each rank sends while all ranks of the host do. Between hosts:
            what the link of a host carries for all its ranks together.
        error: relative half width of a 90% interval of predicted times.
    """

    latency_s: float
    bytes_per_s: float
    error: float


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
        if kind is Collective.broadcast and self.gloo:
            return self._tree_broadcast(payload_bytes, ranks, hosts, groups)
        if kind in (Collective.all_gather, Collective.reduce_scatter) and self.gloo:
            return self._exchange(payload_bytes, ranks, hosts, groups)
        if kind is Collective.broadcast:  # the root's bytes pass through all ranks, in pieces
            return self._ring(payload_bytes, 1.0, ranks - 1, ranks, hosts, groups)
        passes = 2 if kind in (Collective.all_reduce, Collective.statistics) else 1
        whole = payload_bytes * ranks if kind is Collective.outputs else payload_bytes
        ring = self._ring(whole, passes * (ranks - 1) / ranks, passes * (ranks - 1), ranks, hosts, groups)
        if passes == 1 or self.gloo:
            return ring
        return min(ring, self._double_tree(whole, ranks, hosts, groups))

    def error(self, hosts: int) -> float:
        """Return the relative half width of a 90% interval of ``seconds`` for a group over ``hosts`` hosts."""
        return self.inside.error if hosts == 1 else self._link.error

    @property
    def _link(self) -> Level:
        if self.between is None:
            raise ValueError("these links are those of one host")
        return self.between

    def _transfer(self, inside_bytes: float, link_bytes: float) -> float:
        """Return the seconds in which each rank sends ``inside_bytes`` within its host while each host's link carries
        ``link_bytes``."""
        inside_s = inside_bytes / self.inside.bytes_per_s
        return max(inside_s, link_bytes / self._link.bytes_per_s) if link_bytes else inside_s

    def _ring(self, payload: int, factor: float, steps: int, ranks: int, hosts: int, groups: int) -> float:
        """Return the seconds of a ring in which each rank sends ``factor`` times the payload."""
        on_host = _per_host(ranks, hosts)
        sent = factor * payload
        crossing = 0
        if hosts > 1:  # of each W-1 hops in a row, those that leave a host
            crossing = steps // (ranks - 1) * (hosts if on_host > 1 else hosts - 1)
        latency = (steps - crossing) * self.inside.latency_s
        if crossing:
            latency += crossing * self._link.latency_s
        return latency + self._transfer(sent if on_host > 1 else 0, groups * sent if hosts > 1 else 0)

    def _double_tree(self, payload: int, ranks: int, hosts: int, groups: int) -> float:
        """Return the seconds of an all-reduce over two binary trees, in which each host sends all of the payload once
        up and once down (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan", 2009). Inside a host NCCL's trees are chains."""
        on_host = _per_host(ranks, hosts)
        latency = 2 * (on_host - 1) * self.inside.latency_s
        if hosts > 1:
            latency += 2 * math.ceil(math.log2(hosts)) * self._link.latency_s
        return latency + self._transfer(2 * payload if on_host > 1 else 0, 2 * groups * payload if hosts > 1 else 0)

    def _exchange(self, payload: int, ranks: int, hosts: int, groups: int) -> float:
        """Return the seconds in which each rank sends each other rank one part of the payload, all at the same time."""
        on_host = _per_host(ranks, hosts)
        part = payload / ranks
        others = ranks - on_host
        latency = self._link.latency_s if hosts > 1 else self.inside.latency_s
        return latency + self._transfer((on_host - 1) * part, groups * on_host * others * part if hosts > 1 else 0)

    def _tree_broadcast(self, payload: int, ranks: int, hosts: int, groups: int) -> float:
        """Return the seconds of a binomial tree: in round i, ranks below 2^i send the whole payload 2^i ranks ahead."""
        on_host = _per_host(ranks, hosts)
        total = 0.0
        for ahead in (2**i for i in range(math.ceil(math.log2(ranks)))):
            if ahead < on_host:
                total += self.inside.latency_s + payload / self.inside.bytes_per_s
            else:
                total += self._link.latency_s + groups * on_host * payload / self._link.bytes_per_s
        return total


def _per_host(ranks: int, hosts: int) -> int:
    return -(-ranks // hosts)


def links_of(plan: RunPlan) -> Links | None:
    """Return the links of the plan's hosts; None if their rates are not known, or if there is only one rank.

    In order of preference: what the user states (``cluster.link_gbit``), data sheets (``cluster.gpu``).
    """
    cluster = plan.cluster
    if cluster.world_size == 1:
        return None
    gpu = None if cluster.gpu is None else find_gpu(cluster.gpu)
    workers, hosts = cluster.workers_per_node, cluster.nodes
    gloo = cluster.device is Device.cpu
    inside = _inside(gpu) if gpu is not None else _assumed_inside()
    if gpu is None and not gloo and workers > 1:
        return None
    sources: list[str] = []
    between = None
    if hosts > 1:
        step_s = _GLOO_NETWORK_STEP_S if gloo else _NCCL_NETWORK_STEP_S
        if cluster.link_gbit is not None:
            rate, source = cluster.link_gbit, f"cluster.link_gbit={cluster.link_gbit:g}"
        elif gpu is not None and gpu.nic_gbit is not None:
            rate = gpu.nic_gbit * workers
            source = f"{rate:,} Gbit/s for {workers} GPUs of a host, as in the maker's own system of {gpu.name}"
        else:
            return None
        between = Level(latency_s=step_s, bytes_per_s=NETWORK_SHARE * rate * 1e9 / 8, error=_SHEET_ERROR)
        sources.append(source)
    if workers > 1:
        sources.append(f"data sheet of {gpu.name}" if gpu is not None else "assumed 1 GB/s inside a host")
    return Links(inside=inside, between=between, gloo=gloo, source="; ".join(sources))


def _inside(gpu: Gpu) -> Level:
    """Return the links between the GPUs of a host; data sheets state both directions together."""
    if gpu.nvlink_gb_s is not None:
        rate = NVLINK_SHARE * gpu.nvlink_gb_s / 2
        return Level(latency_s=_NVLINK_STEP_S, bytes_per_s=rate * 1e9, error=_SHEET_ERROR)
    rate = PCIE_SHARE * gpu.pcie_gb_s / 2
    return Level(latency_s=_PCIE_STEP_S, bytes_per_s=rate * 1e9, error=_PCIE_ERROR)


def _assumed_inside() -> Level:
    return Level(latency_s=_GLOO_STEP_S, bytes_per_s=_GLOO_BYTES_PER_S, error=_ASSUMED_ERROR)
