"""Evaluation on held-out data: each sample is used once, and all ranks run the same number of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from launcher.errors import DataError, LauncherError
from launcher.heartbeat import HEARTBEAT, Phase, Wait
from launcher.loss import as_losses
from launcher.plan.run_plan import RunPlan
from launcher.task import Task, is_mapped, seed_everything, seed_for
from launcher.train.data.loader import Collate, MicroBatch, prefetch
from launcher.train.data.stream import Shard, blocks_in_turn
from launcher.train.data.window_feed import Samples
from launcher.train.engine.engine import Engine
from launcher.train.engine.loss_terms import HeldOutSums
from launcher.train.engine.preserved_state import SavedAttributes, SavedState
from launcher.train.world import World


class Evaluation:
    """Evaluation of a run's held-out data. All ranks call its methods together, between two windows.

    Args:
        held_out: the data; None: there is none.
    """

    def __init__(self, engine: Engine, task: Task, held_out: Any) -> None:
        self.held_out = held_out
        self._engine, self._task = engine, task

    def try_first(self) -> None:
        """Evaluate the first micro-batch of each rank, so that an error in the evaluation shows before training."""
        if self.held_out is None or isinstance(self.held_out, Iterator):  # an iterator would lose the samples
            return
        kept = SavedAttributes(self._engine.parallel.module, self._task)
        self._totals(max_batches=1)
        self._engine.context.take_scalars()
        if changed := kept.restore():
            print(f"The trial evaluation before the first step changed {changed}.", flush=True)

    def averages(self) -> dict[str, float]:
        """Return the held-out "loss", the mean over items (of several terms, the sum of their means), and the averages
        of named terms and metrics.

        Raises:
            DataError: there is no item.
        """
        averages = self._totals()
        if "loss" not in averages:
            raise DataError(
                "eval_data() has no item: there is nothing to evaluate on.\n  Return None to have no evaluation."
            )
        return averages

    def _totals(self, max_batches: int | None = None) -> dict[str, float]:
        """Return the averages over the held-out data of all ranks. ``max_batches``: limit of micro-batches per rank;
        None: all."""
        engine, collate, target = self._engine, getattr(self._task, "collate", None), self._engine.plan.task.target
        HEARTBEAT.beat(Phase.evaluating)
        sums = HeldOutSums(engine.world, engine.device)
        with _eval_mode(engine) as module:
            batches = eval_batches(self.held_out, engine.plan, engine.world, engine.device, collate, max_batches)
            for number in itertools.count(1):
                with _note_micro_batch(number, engine.world.rank):
                    with HEARTBEAT.waiting_for(Wait.io):
                        batch = next(batches, None)
                    if batch is None:
                        break
                    HEARTBEAT.beat(Phase.evaluating, number)
                    with engine.precision.autocast():
                        losses = as_losses(self._task.loss(module, batch.data), batch.samples, target)
                    sums.add(losses, batch.samples)
        return sums.averages()


@contextmanager
def _eval_mode(engine: Engine) -> Iterator[nn.Module]:
    """Yield the model in eval mode with rank 0's buffers.

    Random state, buffers and each module's mode are restored at the end.
    """
    module = engine.parallel.module
    kept = SavedState(module, engine.device)
    training = [part for part in module.modules() if part.training]  # a task may keep some modules in eval mode
    seed_everything(seed_for(engine.plan.train.seed, f"evaluation on rank {engine.world.rank}"))
    engine.share_buffers(watch=False)
    module.eval()
    try:
        with torch.no_grad(), engine.parallel.evaluation(), engine.context.evaluation():
            yield module
    finally:
        for part in training:
            part.training = True
        kept.restore()


@contextmanager
def _note_micro_batch(number: int, rank: int) -> Iterator[None]:
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
    max_batches: int | None = None,
) -> Iterator[MicroBatch]:
    """Return this rank's share of ``dataset`` in micro-batches; each sample is in the share of exactly one rank.

    Every rank gets the same number of micro-batches, because a sharded model needs all ranks in each forward pass.
    Ranks without samples get stand-ins, which count 0 samples.

    Args:
        max_batches: maximum number of micro-batches; None: all.
    """
    collate = collate or default_collate
    size = plan.batch.micro_size
    if not is_mapped(dataset):
        blocks = blocks_in_turn(size, world.size, world.rank)
        shard = Shard(dataset, blocks, collate, plan.train.seed, epoch=0)
        return itertools.islice(_in_step(prefetch(shard, plan, device, plan.train.seed), world), max_batches)
    own = range(world.rank, len(dataset), world.size)
    rounds = -(-len(dataset) // (size * world.size))
    shares = [own[start : start + size] for start in range(0, rounds * size, size)][:max_batches]
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


class _InOrder(Samples):
    """Dataset whose items are ranges of samples, collated."""

    def __getitem__(self, indices: range) -> tuple[Any, int]:
        used = indices or range(1)
        # the same random numbers in every evaluation and for every world size
        return self.batch(used, 0, used), len(indices)
