"""Evaluation on held-out data: each sample is used once, and all ranks run the same number of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, default_collate

from launcher.errors import DataError, LauncherError
from launcher.plan.run_plan import RunPlan
from launcher.task import is_mapped, seed_everything, seed_for
from launcher.train.data.loader import Collate, MicroBatch, prefetch
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.window_feed import Shard, blocks_in_turn
from launcher.train.engine.engine import Engine
from launcher.train.engine.preserved_state import Kept
from launcher.train.world import World


@contextmanager
def evaluation(engine: Engine) -> Iterator[nn.Module]:
    """Yield the model in eval mode with rank 0's buffers, between two windows.

    Random state, buffers and each module's mode are restored at the end.
    """
    module = engine.parallel.module
    kept = Kept(module, engine.device)
    training = [part for part in module.modules() if part.training]  # a task may keep some modules in eval mode
    seed_everything(seed_for(engine.plan.train.seed, f"evaluation on rank {engine.world.rank}"))
    engine.share_buffers(watch=False)
    module.eval()
    try:
        with torch.no_grad(), engine.parallel.evaluation():
            yield module
    finally:
        for part in training:
            part.training = True
        kept.put_back()


@contextmanager
def named_as_held_out(number: int, rank: int) -> Iterator[None]:
    """Add to an error of the body that it occurred in micro-batch ``number`` of the evaluation."""
    try:
        yield
    except Exception as error:
        where = f"While micro-batch {number} of eval_data() was evaluated on rank {rank}."
        if isinstance(error, LauncherError):  # shown without traceback, hence without notes
            error.args = (f"{error}\n  {where}",)
        else:
            error.add_note(where)
        raise


def eval_batches(
    dataset: Any,
    plan: RunPlan,
    world: World,
    device: torch.device,
    collate: Collate | None = None,
    most: int | None = None,
) -> Iterator[MicroBatch]:
    """Return this rank's share of ``dataset`` in micro-batches; each sample is in the share of exactly one rank.

    Every rank gets the same number of micro-batches, because a sharded model needs all ranks in each forward pass.
    Ranks without samples get stand-ins, which count 0 samples.

    Args:
        most: maximum number of micro-batches; None: all.
    """
    collate = collate or default_collate
    size = plan.batch.micro_size
    if not is_mapped(dataset):
        blocks = blocks_in_turn(size, world.size, world.rank)
        shard = Shard(dataset, blocks, collate, plan.train.seed, epoch=0)
        return itertools.islice(_in_step(prefetch(shard, plan, device, plan.train.seed), world), most)
    mine = range(world.rank, len(dataset), world.size)
    rounds = -(-len(dataset) // (size * world.size))
    shares = [mine[at * size : (at + 1) * size] for at in range(rounds)][:most]
    return prefetch(_InOrder(dataset, collate, plan.train.seed), plan, device, plan.train.seed, order=shares)


def _in_step(batches: Iterator[MicroBatch], world: World) -> Iterator[MicroBatch]:
    """Yield ``batches``, and then stand-ins until the batches of all ranks have ended."""
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
    """Dataset that collates the samples of a range of indices."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset, self._collate = dataset, collate
        self._random = SampleRandom(seed)

    def __getitem__(self, indices: range) -> tuple[Any, int]:
        samples: list[Any] = []
        with self._random.own():
            for index in indices or (0,):
                self._random.seed(0, index)  # the same numbers in every evaluation and for every world size
                samples.append(self._dataset[index])
            return self._collate(samples), len(indices)
