"""Which windows are verified, how the engine gets them, and their samples in one list, read without the engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, Subset

from launcher.batch import Batch
from launcher.config import ShortWindow
from launcher.plan import EpochPlan, RunPlan
from launcher.train import data
from launcher.train.randomness import SampleRandom
from launcher.train.sampling import Permutation
from launcher.train.world import World

# DDP lays its buckets out anew after the first window: the second is another code path
FULL_WINDOWS = 2


@dataclass(frozen=True)
class Trial:
    """A window to verify: ``size`` samples at ``place``. ``cut``: how many samples the data is cut to, so that its last
    window is a short one; None for the data as it is."""

    name: str
    place: data.Place
    size: int
    cut: int | None = None


def short_size(batch: Batch) -> int:
    """Samples of a short window that is made up: over half of a window, and no whole number of micro-batches if that
    can be; 0 where a window cannot be short."""
    return batch.global_size // 2 + 1 if batch.global_size > 2 else batch.global_size - 1


class MapTrials:
    """Of data with a length: membership of a window is arithmetic."""

    def __init__(self, dataset: Any, plan: RunPlan) -> None:
        assert plan.task.samples is not None
        assert plan.epoch.windows is not None
        self._dataset, self._plan, self._count = dataset, plan, plan.task.samples
        self._random = SampleRandom(plan.train.seed)
        short, windows = plan.epoch.short_window, plan.epoch.windows
        full = min(FULL_WINDOWS, windows - bool(short))
        self.trials = [
            Trial(f"window {n + 1}", data.Place(n, 0, n), plan.batch.global_size) for n in range(full)
        ]  # fmt: skip
        made_up = short_size(plan.batch)
        if short:
            last = windows - 1
            self.trials.append(Trial(f"window {windows}, short", data.Place(last, 0, last), short))
        elif plan.epoch.short_window_policy is ShortWindow.exact and made_up:
            self.trials.append(Trial("short window, made up", data.BEGINNING, made_up, cut=made_up))

    def feed(self, trial: Trial, plan: RunPlan) -> tuple[Any, RunPlan]:
        """The data in which the trial's window lies at its place, and ``plan`` for that data."""
        if trial.cut is None:
            return self._dataset, plan
        task = dataclasses.replace(plan.task, samples=trial.cut)
        epoch = EpochPlan(windows=1, short_window=trial.cut, short_window_policy=plan.epoch.short_window_policy)
        return Subset(self._dataset, range(trial.cut)), dataclasses.replace(plan, task=task, epoch=epoch)

    def samples(self) -> list[list[Any]]:
        """Of each trial, in the window's order. Random numbers that reading draws are those of each sample."""
        return [list(self._read(trial)) for trial in self.trials]

    def _read(self, trial: Trial) -> Iterator[Any]:
        first = trial.place.window * self._plan.batch.global_size
        order = Permutation(trial.cut or self._count, self._plan.train.seed, 0).take(first, trial.size)
        for position, index in enumerate(order, first):
            with self._random.own():
                self._random.seed(0, position)
                sample = self._dataset[index]
            yield sample


class StreamTrials:
    """Of a stream: every rank reads what is its own to read. Collective: all ranks make it together."""

    def __init__(self, dataset: Any, plan: RunPlan, world: World) -> None:
        self._dataset, self._plan = dataset, plan
        self._sharded = bool(getattr(dataset, "sharded", False))
        batch, size = plan.batch, plan.batch.global_size
        self._sources = world.size if self._sharded else 1
        made_up = short_size(batch)
        # behind a full window: a rank whose share has ended by then has something to run with weight zero
        self._cut_at = size + made_up if made_up else None
        parts = [self._gathered(dataset, n, world) for n in range(FULL_WINDOWS)]
        if self._cut_at is not None:
            parts.append(self._gathered(self._cut(self._cut_at, world), 1, world))
        counts = world.of_rank_0([len(samples) for samples in parts])
        self.trials = [
            Trial(f"window {n + 1}{'' if count == size else ', short'}", data.Place(n, 0, n), count)
            for n, count in enumerate(counts[:FULL_WINDOWS])
            if count
        ]
        if self._cut_at is not None and counts[-1]:
            self.trials.append(Trial("short window, made up", data.Place(1, 0, 1), counts[-1], self._cut_at))
        self._samples = [samples for samples, count in zip(parts, counts, strict=True) if count]
        self._world = world

    def _gathered(self, dataset: Any, window: int, world: World) -> list[Any]:
        """The window's samples, on rank 0; elsewhere at most those that the rank reads itself."""
        batch = self._plan.batch
        if self._sharded:
            blocks, count = data.blocks_of_windows(batch, 0, world.rank), batch.accumulation
        else:  # it is every rank's, and rank 0 reads it
            blocks, count = data.blocks_in_turn(batch.global_size, 1, 0), 1
        found: list[Any] = []
        if self._sharded or world.rank == 0:
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(0)
            shard = data.Shard(dataset, blocks, list, self._plan.train.seed, 0)
            mine = itertools.islice(shard, window * count, (window + 1) * count)
            found = [sample for block, size in mine for sample in block[: max(0, size)]]
        if not self._sharded or world.size == 1:
            return found
        everyone: list[Any] = [[]] * world.size
        dist.gather_object(found, everyone if world.rank == 0 else None, 0)
        return [sample for samples in everyone for sample in samples]

    def _cut(self, samples: int, world: World) -> _Cut:
        own = samples // world.size + (world.rank < samples % world.size) if self._sharded else samples
        return _Cut(self._dataset, own, self._sharded)

    def feed(self, trial: Trial, plan: RunPlan) -> tuple[Any, RunPlan]:
        return self._dataset if trial.cut is None else self._cut(trial.cut, self._world), plan

    def samples(self) -> list[list[Any]]:
        return self._samples


class _Cut(IterableDataset[Any]):
    """The beginning of a stream."""

    def __init__(self, dataset: Any, samples: int, sharded: bool) -> None:
        self._dataset, self._count, self.sharded = dataset, samples, sharded

    def set_epoch(self, epoch: int) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._count)


def choose(dataset: Any, plan: RunPlan, world: World) -> MapTrials | StreamTrials:
    """All ranks call it."""
    return MapTrials(dataset, plan) if plan.task.samples is not None else StreamTrials(dataset, plan, world)
