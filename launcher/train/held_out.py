"""Held-out data: every sample once, shared by the ranks, and as many micro-batches for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, default_collate

from launcher.errors import DataError
from launcher.plan import RunPlan
from launcher.train.data import Collate, Shard, blocks_in_turn
from launcher.train.loader import MicroBatch, prefetch
from launcher.train.world import World


def eval_batches(
    dataset: Any, plan: RunPlan, world: World, device: torch.device, collate: Collate | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of ``dataset``, once, in micro-batches; the shares of all ranks are the whole.

    Every rank gets as many: a sharded model needs all ranks in each forward pass. A stand-in counts 0 samples.
    """
    collate = collate or default_collate
    size = plan.batch.micro_size
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        blocks = blocks_in_turn(size, world.size, world.rank)
        shard = Shard(dataset, blocks, collate, plan.train.seed, epoch=0)
        return _in_step(prefetch(shard, plan, device, plan.train.seed), world)
    mine = range(world.rank, len(dataset), world.size)
    rounds = -(-len(dataset) // (size * world.size))
    shares = [mine[at * size : (at + 1) * size] for at in range(rounds)]
    return prefetch(_InOrder(dataset, collate), plan, device, plan.train.seed, order=shares)


def _in_step(batches: Iterator[MicroBatch], world: World) -> Iterator[MicroBatch]:
    """``batches``, and stand-ins after them until the last rank's have ended."""
    last: MicroBatch | None = None
    while True:
        batch = next(batches, None)
        more = torch.tensor([batch is not None], dtype=torch.uint8)
        if world.size > 1:
            dist.all_reduce(more, dist.ReduceOp.MAX)
        if not more.item():
            return
        last = batch or (last and MicroBatch(last.data, 0))
        if last is None:
            raise DataError(
                f"eval_data() has fewer blocks of batch.micro_size samples than ranks: rank {world.rank} got none."
            )
        yield last


class _InOrder(Dataset[tuple[Any, int]]):
    """Collates the samples of a range."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, indices: range) -> tuple[Any, int]:
        return self._collate([self._dataset[index] for index in indices or (0,)]), len(indices)
