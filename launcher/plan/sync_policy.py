"""Sync policies: which micro-batches synchronise, and how often a window sends each part of the model.

The plan predicts with these functions, the wrapped model acts on them (``micro_batch`` in train/parallel/ddp.py and
fsdp.py), and the meter checks measured traffic against them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from launcher.config.schema import StrategyKind, Sync

SHARDED = (StrategyKind.fsdp, StrategyKind.hsdp)
POLICIES: Mapping[StrategyKind, tuple[Sync, ...]] = {
    StrategyKind.single: (Sync.every, Sync.boundary),
    StrategyKind.ddp: (Sync.every, Sync.boundary),
    StrategyKind.fsdp: (Sync.every, Sync.boundary, Sync.gather_once),
    StrategyKind.hsdp: (Sync.every, Sync.boundary, Sync.gather_once, Sync.replicas_at_boundary),
}


# policies that reduce the gradients of each micro-batch: over some ranks, and over all
REDUCING = (Sync.every, Sync.replicas_at_boundary)
REDUCING_OVER_ALL = (Sync.every,)


def reduces(sync: Sync, *, last: bool) -> bool:
    """Return whether a micro-batch's gradients are reduced over some ranks: all of them, or the shard group.

    Args:
        last: whether it is the window's last micro-batch.
    """
    return last or sync in REDUCING


def reduces_over_all(sync: Sync, *, last: bool) -> bool:
    """Return whether a micro-batch's gradients are reduced over all ranks, replicas included."""
    return last or sync in REDUCING_OVER_ALL


class Collective(StrEnum):
    """Kind of collective operation.

    Attributes:
        all_reduce: gradients, over all ranks (DDP) or between replicas (HSDP).
        all_gather, reduce_scatter: parameters and gradients within a shard group.
        broadcast: buffers that training changes.
        statistics: all-reduces of the statistics that ``batch.norm`` computes over all ranks.
        outputs: rows of each rank that a task's ``window_loss`` needs, sent to all ranks.
    """

    all_reduce = "all_reduce"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    broadcast = "broadcast"
    statistics = "statistics"
    outputs = "outputs"


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Number of times that a window sends each part.

    Attributes:
        all_reduce: all gradients between replicas.
        reduce_scatter: all gradients within the shard group.
        gather_units: parameters of each shard unit.
        gather_root: parameters of the root, which stay gathered between forward and backward.
    """

    all_reduce: int = 0
    reduce_scatter: int = 0
    gather_units: int = 0
    gather_root: int = 0


@functools.cache  # the meter asks for each window
def transfers_per_window(strategy: StrategyKind, sync: Sync, micro_batches: int) -> Transfers:
    """Return the transfers of a window of ``micro_batches`` per rank."""
    k = micro_batches
    reduce = k if reduces_over_all(sync, last=False) else 1
    if strategy not in SHARDED:
        return Transfers(all_reduce=reduce)
    once = sync is Sync.gather_once
    return Transfers(
        all_reduce=reduce if strategy is StrategyKind.hsdp else 0,
        reduce_scatter=k if reduces(sync, last=False) else 1,
        gather_units=1 if once else 2 * k,
        gather_root=1 if once else k,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a model over the ranks. Bytes are payload: what one rank hands to a collective in one transfer.

    Args:
        shard_size: ranks that share one copy of the parameters; 1 for DDP.
        replicas: number of copies.
        unit_bytes, root_bytes: parameters within and outside shard units, in the format in which they are gathered.
        gradient_bytes: all gradients, in the format in which they are reduced.
    """

    shard_size: int
    replicas: int
    unit_bytes: int
    root_bytes: int
    gradient_bytes: int

    @classmethod
    def replicated(cls, gradient_bytes: int, replicas: int) -> Self:
        """Return the layout with a whole copy on each rank."""
        return cls(shard_size=1, replicas=replicas, unit_bytes=0, root_bytes=0, gradient_bytes=gradient_bytes)

    def payload(self, sent: Transfers) -> dict[Collective, int]:
        """Return the payload bytes of ``sent`` by collective; a group of one rank sends nothing."""
        sharded, replicated = self.shard_size > 1, self.replicas > 1
        return {
            Collective.all_reduce: replicated * sent.all_reduce * self.gradient_bytes // self.shard_size,
            Collective.all_gather: sharded * (sent.gather_units * self.unit_bytes + sent.gather_root * self.root_bytes),
            Collective.reduce_scatter: sharded * sent.reduce_scatter * self.gradient_bytes,
        }

    def wire(self, payload: Mapping[Collective, int]) -> int:
        return round(sum(count * self.wire_factor(kind) for kind, count in payload.items()))

    def wire_factor(self, kind: Collective) -> float:
        """Return the wire bytes that one rank sends per payload byte.

        In a ring of W ranks: 2(W-1)/W for an all-reduce, (W-1)/W for a gather or scatter (Patarasuk & Yuan, 2009); a
        broadcast forwards each byte once. A rank's own rows (outputs) pass through all others.
        """
        if kind is Collective.broadcast:
            return 1.0
        world_size = self.shard_size * self.replicas
        if kind is Collective.statistics:
            return 2 * (world_size - 1) / world_size
        if kind is Collective.outputs:  # the payload is this rank's own rows
            return world_size - 1
        if kind is Collective.all_reduce:
            return 2 * (self.replicas - 1) / self.replicas
        return (self.shard_size - 1) / self.shard_size
