"""Evaluation on held-out data: each sample is used once, and all ranks run the same number of micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from launcher.errors import DataError, EngineMisuse, LauncherError, TaskError
from launcher.heartbeat import HEARTBEAT, Phase, Wait
from launcher.loss import Loss, as_losses, loss_form
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_names
from launcher.task import Task, empty_eval_set, eval_set_text, is_mapped, is_ready, seed_everything, seed_for
from launcher.train.data.loader import Collate, MicroBatch, prefetch
from launcher.train.data.stream import StreamShare, blocks_in_turn, is_sharded
from launcher.train.data.window_feed import Samples
from launcher.train.engine.engine import Engine
from launcher.train.engine.loss_terms import HeldOutSums, terms_of_forward
from launcher.train.engine.modes import kept_modes
from launcher.train.engine.preserved_state import SavedState
from launcher.train.engine.window import Forward
from launcher.train.eval_metrics import EvalMetrics
from launcher.train.metrics import Metrics
from launcher.train.world import World, sending_device


class Evaluation:
    """Evaluation of a run's held-out data. All ranks call its methods together, between two windows.

    Args:
        sets: the data sets by name; "" is the name of a single one; empty: there is no held-out data.
    """

    def __init__(self, engine: Engine, task: Task, sets: Mapping[str, Any]) -> None:
        self.sets = sets
        self._engine, self._task = engine, task
        self._metrics = EvalMetrics(task, engine.plan.train.seed, engine.world, engine.device)
        self._names_known = True  # False once a metric could not be computed in the trial

    @property
    def loss_names(self) -> set[str]:
        """Names of the losses that every evaluation yields."""
        return {"eval/loss", *(f"eval/{name}/loss" for name in self.sets if name)} if self.sets else set()

    def try_first(self) -> set[str] | None:
        """Evaluate the first micro-batch of each rank and set, so that an error in the evaluation shows before
        training.

        Returns:
            Names of the metrics; None if they are not known.
        """
        kept = self._engine.preserve()
        # an iterator would lose the samples
        tried = {name: data for name, data in self.sets.items() if not isinstance(data, Iterator)}
        results = {name: {"loss": math.nan} | self._values(name, trial=True) for name in tried}
        self._engine.context.take_scalars()
        if changed := kept.undo():
            print(f"The trial evaluation before the first step changed {changed}.", flush=True)
        return set(_by_name(results)) if len(tried) == len(self.sets) and self._names_known else None

    def run(self) -> Metrics:
        """Return the metrics of all sets. Those of set NAME are ``eval/NAME/...``; ``eval/...`` are the first set's.

        Raises:
            DataError: a set has no item.
        """
        results = {name: self._values(name) for name in self.sets}
        for name, values in results.items():
            if "loss" not in values:
                raise DataError(
                    f"{eval_set_text(name)} has no item: there is nothing to evaluate on.\n  "
                    + ("Leave it out." if name else "Return None to have no evaluation.")
                )
        metrics = _by_name(results)
        if self._engine.plan.checkpoint.best is None and not self._engine.callbacks.names:
            return metrics
        return self._engine.world.of_rank_0(metrics)  # ranks that differ in the last digit would decide differently

    def _values(self, name: str, *, trial: bool = False) -> Metrics:
        """Return the averages over one set on all ranks, nan if there is nothing to count, and the task's
        ``eval_metrics()``. "loss" is the mean over items (of several terms, the sum of their means); it is missing if
        there is no item. ``trial``: only each rank's first micro-batch."""
        engine, collate = self._engine, getattr(self._task, "collate", None)
        HEARTBEAT.beat(Phase.evaluating)
        sums = HeldOutSums(engine.world)
        self._metrics.reset()
        form = loss_form(self._task)
        groups = None if form is None else form.held_out(engine, self.sets[name])
        with eval_mode(engine, name) as module:
            limit = 1 if trial else None
            batches = eval_batches(self.sets[name], engine.plan, engine.world, engine.device, collate, limit)
            for number in itertools.count(1):
                with _note_micro_batch(number, name, engine.world.rank):
                    with HEARTBEAT.waiting_for(Wait.io):
                        batch = next(batches, None)
                    if batch is None and number == 1:  # the same on all ranks
                        raise empty_eval_set(name, self.sets[name])
                    if batch is None:
                        break
                    HEARTBEAT.beat(Phase.evaluating, number)
                    engine.parallel.meter.open_window()  # a long evaluation must not keep the timers of all batches
                    with engine.precision.autocast():
                        found = [*self._losses(module, batch, groups)]
                    self._add(found, sums)
            if groups is not None:
                self._add(groups.rest(), sums)
            with HEARTBEAT.waiting_for(Wait.collective):
                averages = sums.averages()
            computed = self._metrics.compute(trial=trial)
        self._names_known &= computed is not None
        if twice := [key for key in computed or {} if key in (*sums.names, "loss")]:
            raise TaskError(f"eval_metrics() has {first_names(twice)}, as the loss has.\n  Choose another name.")
        return dict.fromkeys(sums.names, math.nan) | averages | (computed or {})

    def _add(self, losses: Iterable[tuple[list[Loss], int]], sums: HeldOutSums) -> None:
        for terms, samples in losses:
            sums.add(terms, samples)
            if samples:
                self._metrics.update(terms)

    def _losses(self, module: nn.Module, batch: MicroBatch, groups: Any) -> Iterable[tuple[list[Loss], int]]:
        """Return the loss of a micro-batch and its samples; with ``groups``, of each group that it completes."""
        if groups is not None:
            return groups.add(module, batch.data, batch.samples)
        target = self._engine.plan.task.target
        return [(as_losses(self._task.loss(module, batch.data), batch.samples, target), batch.samples)]


@dataclass(frozen=True)
class LoopTask:
    """Loss and collate function of the user's own loop, where the trainer expects those of a task."""

    forward: Forward | None
    collate: Collate | None

    def loss(self, model: Callable[..., Any], batch: Any) -> Any:
        assert self.forward is not None
        value: Any = self.forward(model, batch)
        return terms_of_forward(value) if isinstance(value, tuple) else value


def sets_by_name(data: Any) -> dict[str, Any]:
    """Return data sets by name; "" is the name of a single one."""
    if data is None:
        return {}
    sets = cast("dict[str, Any]", data) if isinstance(data, dict) else {"": data}
    if any(map(is_ready, sets.values())):
        raise EngineMisuse(
            "The held-out data is a DataLoader: the engine makes up batches of samples itself, each of which counts "
            "once.\n  Give its dataset, and its collate_fn as collate."
        )
    return sets


def _by_name(results: Mapping[str, Metrics]) -> Metrics:
    """Return the metrics of all sets by their names in the record; the first set's also without its name."""
    metrics = {f"eval/{key}": value for key, value in next(iter(results.values()), {}).items()}
    for name, values in results.items():
        metrics |= {f"eval/{name}/{key}": value for key, value in values.items() if name}
    return metrics


@contextmanager
def eval_mode(engine: Engine, name: str) -> Iterator[nn.Module]:
    """Yield the model in eval mode with rank 0's buffers, for the evaluation of set ``name``.

    Random state, buffers and each module's mode are restored at the end.
    """
    module = engine.parallel.module
    kept = SavedState(module, engine.device)
    seed_everything(seed_for(engine.plan.train.seed, f"evaluation on rank {engine.world.rank}"))
    engine.share_buffers(watch=False)
    try:
        with kept_modes(engine.parallel):
            engine.parallel.set_mode(module, False)
            with torch.no_grad(), engine.parallel.evaluation(), engine.context.evaluation(name or None):
                yield module
    finally:
        kept.restore()


@contextmanager
def _note_micro_batch(number: int, name: str, rank: int) -> Iterator[None]:
    """Add to an error of the body that it occurred in micro-batch ``number`` of the evaluation of set ``name``."""
    try:
        yield
    except Exception as error:
        where = f"While micro-batch {number} of {eval_set_text(name)} was evaluated on rank {rank}."
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
    Ranks without samples get stand-ins, which count 0 samples. ``train.eval_samples`` limits the samples of all ranks
    together: to the first ones of a stream, and to samples spread evenly over a data set with a length.

    Args:
        max_batches: maximum number of micro-batches; None: all.
    """
    collate, limit = collate or default_collate, plan.train.eval_samples
    size = plan.eval_size
    if not is_mapped(dataset):
        rounds = blocks_in_turn(size, world.size, world.rank)
        stream = dataset if limit is None else _FirstSamples(dataset, limit, world)
        share = StreamShare(stream, rounds, collate, plan.train.seed, epoch=0, rank=world.rank)
        return itertools.islice(_in_step(prefetch(share, plan, device, plan.train.seed), world, size), max_batches)
    samples = len(dataset)
    used = samples if limit is None else min(limit, samples)
    own = [number * samples // used for number in range(world.rank, used, world.size)]
    rounds = -(-used // (size * world.size))
    shares = [own[start : start + size] for start in range(0, rounds * size, size)][:max_batches]
    return prefetch(_InOrder(dataset, collate, plan.train.seed), plan, device, plan.train.seed, order=shares)


def _in_step(batches: Iterator[MicroBatch], world: World, size: int) -> Iterator[MicroBatch]:
    """Yield ``batches``, and then stand-ins until the batches of all ranks have ended."""
    last: MicroBatch | None = None
    device = sending_device() if world.size > 1 else None
    while True:
        batch = next(batches, None)
        more = torch.tensor([batch is not None], dtype=torch.uint8, device=device)
        if world.size > 1:
            dist.all_reduce(more, dist.ReduceOp.MAX)
        if not more.item():
            return
        last = batch or (last and MicroBatch(last.data, 0))
        if last is None:
            raise DataError(
                f"eval_data() has fewer blocks of {size} samples than ranks: rank {world.rank} got none.\n"
                "  Use a smaller train.eval_micro_size, or fewer ranks."
            )
        yield last


class _InOrder(Samples):
    """Dataset whose items are lists of samples, collated."""

    def __getitem__(self, indices: list[int]) -> tuple[Any, int]:
        used = indices or range(1)
        # the same random numbers in every evaluation and for every world size
        return self.batch(used, 0, used), len(indices)


class _FirstSamples(IterableDataset[Any]):
    """First ``count`` samples of a stream; if it shards itself, this rank's part of that number."""

    def __init__(self, stream: Iterable[Any], count: int, world: World) -> None:
        self.sharded = is_sharded(stream)
        self._stream = stream
        self._count = len(range(world.rank, count, world.size)) if self.sharded else count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._count)
