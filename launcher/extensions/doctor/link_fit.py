"""Fit of the links between ranks to measured collectives: latency and bandwidth inside a host and between hosts, and
how far off the model is.

A model of latency and bandwidth with two levels. A ring of W ranks passes an all-gather or a reduce-scatter on in W-1
steps, in which each rank sends (W-1)/W of the payload; an all-reduce is both (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009; Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005). Steps are pipelined, so the slowest link of the ring sets the rate.

Ranks are numbered host by host. A ring then leaves each host once, so the host's link carries what one rank sends, for
each group that has such a ring. NCCL runs several rings over all network adapters of a host, which together are its
link, and takes a tree for an all-reduce where the tree is faster (NCCL, src/graph/tuning.cc). gloo runs an all-reduce
as a ring; on CPUs the launcher itself runs all-gathers and reduce-scatters, in which each rank sends every other rank
its part directly (train/parallel/collectives.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.plan.sync_policy import Collective

# payloads that show the latency, and those that show the bandwidth and in which the error counts: smaller ones take
# little of a step
SMALL_BYTES, LARGE_BYTES = 2**14, 2**20
_LEAST_ERROR = 0.03
_ROUNDS = 4


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
    """

    inside: Level
    between: Level | None
    gloo: bool

    def seconds(self, kind: Collective, payload_bytes: int, *, ranks: int, hosts: int, groups: int = 1) -> float:
        """Return the seconds of one collective by itself.

        Args:
            kind: all_reduce, all_gather or reduce_scatter.
            payload_bytes: what one rank hands to it, as ``Layout`` counts.
            ranks, hosts: size of the group, and number of hosts over which its ranks are spread evenly.
            groups: groups with ranks on the same host that run this collective at the same time and share the host's
                link, such as the replicas' all-reduces of HSDP: one for each worker of a host.
        """
        between = None if self.between is None else self.between.for_kind(kind)
        route = _Route(self.inside.for_kind(kind), between, ranks, hosts, groups)
        sent = payload_bytes * (ranks - 1) / ranks
        if kind is not Collective.all_reduce:
            return route.exchange(payload_bytes) if self.gloo else route.ring(sent, 1)
        ring = route.ring(sent, 2)
        return ring if self.gloo else min(ring, route.double_tree(payload_bytes))


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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured collective.

    Attributes:
        payload_bytes, ranks, hosts, groups: as in ``Links.seconds``; the groups ran at the same time.
        seconds: on the slowest rank.
    """

    kind: Collective
    payload_bytes: int
    ranks: int
    hosts: int
    groups: int
    seconds: float

    def predict(self, links: Links) -> float:
        """Return the seconds that the model gives."""
        return links.seconds(self.kind, self.payload_bytes, ranks=self.ranks, hosts=self.hosts, groups=self.groups)


def fit_levels(samples: Sequence[Sample], *, gloo: bool) -> tuple[Level | None, Level | None]:
    """Return the levels inside a host and between hosts that fit ``samples``; None if nothing was measured there.

    The level between hosts is fitted to groups with one rank on each host. Others use both levels, and count for the
    error only.
    """
    within = [sample for sample in samples if sample.hosts == 1]
    across = [sample for sample in samples if sample.hosts > 1]
    inside = _fit_level(within, gloo)
    between = _fit_level([sample for sample in across if sample.ranks == sample.hosts], gloo)
    if inside is not None:
        links = Links(inside=inside, between=None, gloo=gloo)
        inside = dataclasses.replace(inside, error=_error_of(links, within))
    if between is not None:
        links = Links(inside=inside or between, between=between, gloo=gloo)
        between = dataclasses.replace(between, error=_error_of(links, across))
    return inside, between


def _error_of(links: Links, samples: Iterable[Sample]) -> float:
    """Return the relative deviation that 90% of the large ``samples`` do not exceed."""
    off = sorted(abs(one.seconds / one.predict(links) - 1) for one in samples if one.payload_bytes >= LARGE_BYTES)
    return max(_LEAST_ERROR, off[math.ceil(0.9 * len(off)) - 1]) if off else 1.0


def _fit_level(samples: Sequence[Sample], gloo: bool) -> Level | None:
    """Return the level with a latency and a bandwidth for each kind; the level's own ones are those of all-reduces."""
    rates = {kind: _fit([one for one in samples if one.kind is kind], kind, gloo) for kind in Collective}
    found = {kind: rate for kind, rate in rates.items() if rate is not None}
    if Collective.all_reduce not in found:
        return None
    first = found.pop(Collective.all_reduce)
    return Level(latency_s=first.latency_s, bytes_per_s=first.bytes_per_s, error=0.0, own=tuple(found.values()))


def _fit(samples: Sequence[Sample], kind: Collective, gloo: bool) -> Rate | None:
    """Return the latency and bandwidth of one kind; None if the payloads were all small, or all large.

    Medians of what single measurements give: small payloads the latency, large ones the bandwidth. Unlike least
    squares, a measurement during which another process had the machine does not move them, nor do payloads between,
    which buffers on the way may hold.
    """
    rows = [(*_coefficients(sample, gloo), sample.seconds) for sample in samples]
    small = [row for sample, row in zip(samples, rows, strict=True) if sample.payload_bytes <= SMALL_BYTES]
    large = [row for sample, row in zip(samples, rows, strict=True) if sample.payload_bytes >= LARGE_BYTES]
    if not small or not large:
        return None
    latency_s = second_per_byte = 0.0
    for _ in range(_ROUNDS):  # each needs the other
        latency_s = max(0.0, median((seconds - moved * second_per_byte) / steps for steps, moved, seconds in small))
        # if the small ones were measured on a busy machine, at least half of the time is still that of the bytes
        second_per_byte = median(
            max(seconds - steps * latency_s, seconds / 2) / moved for steps, moved, seconds in large
        )
    return Rate(kind=kind, latency_s=latency_s, bytes_per_s=1 / second_per_byte)


def _coefficients(sample: Sample, gloo: bool) -> tuple[float, float]:
    """Return (steps, bytes), with which a sample takes steps * latency + bytes / bandwidth on its level."""
    step = Level(latency_s=1.0, bytes_per_s=math.inf, error=0.0)
    byte = Level(latency_s=0.0, bytes_per_s=1.0, error=0.0)
    steps, moved = (sample.predict(Links(inside=one, between=one, gloo=gloo)) for one in (step, byte))
    return steps, moved
