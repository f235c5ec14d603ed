"""Engine side of verification: the gradients of the verified windows, as the optimizer would receive them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Subset

from launcher.config.schema import Compress, Parameters, PrecisionKind, ShortWindow
from launcher.errors import DataError, NotFinite, PolicyNotObserved, TaskError, UnusedParameters
from launcher.plan.batch import Batch
from launcher.plan.run_plan import EpochPlan, RunPlan
from launcher.task import Task, load_task, seed_everything, train_data
from launcher.train.data.loader import BEGINNING, Place
from launcher.train.data.randomness import Permutation, SampleRandom
from launcher.train.data.window_feed import Shard, blocks_in_turn, blocks_of_windows
from launcher.train.engine.engine import Engine
from launcher.train.engine.preserved_state import Kept
from launcher.train.engine.window_totals import StepResult
from launcher.train.trainer import loss_and_items
from launcher.train.world import World, device_of
from launcher.verify.comparison import Gradient, without_dropout

# DDP rebuilds its buckets after the first window, so the second one takes a different code path
FULL_WINDOWS = 2


@dataclass(frozen=True)
class Trial:
    """Window to verify: ``size`` samples at ``place``.

    Attributes:
        cut: truncate the data to this many samples, so that its last window is short; None: use the data as it is.
    """

    name: str
    place: Place
    size: int
    cut: int | None = None


def short_size(batch: Batch) -> int:
    """Return the samples of an artificial short window; 0 if a window cannot be short.

    It is over half of a window and, if possible, not a whole number of micro-batches.
    """
    return batch.global_size // 2 + 1 if batch.global_size > 2 else batch.global_size - 1


class MapTrials:
    """Windows of data with a length, whose samples are computed from the window number."""

    def __init__(self, dataset: Any, plan: RunPlan) -> None:
        assert plan.task.samples is not None
        assert plan.epoch.windows is not None
        self._dataset, self._plan, self._count = dataset, plan, plan.task.samples
        self._random = SampleRandom(plan.train.seed)
        short, windows = plan.epoch.short_window, plan.epoch.windows
        full = min(FULL_WINDOWS, windows - bool(short))
        self.trials = [
            Trial(f"window {n + 1}", Place(n, 0, n), plan.batch.global_size) for n in range(full)
        ]  # fmt: skip
        made_up = short_size(plan.batch)
        if short:
            last = windows - 1
            self.trials.append(Trial(f"window {windows}, short", Place(last, 0, last), short))
        elif plan.epoch.short_window_policy is ShortWindow.exact and made_up:
            self.trials.append(Trial("short window, made up", BEGINNING, made_up, cut=made_up))

    def feed(self, trial: Trial, plan: RunPlan) -> tuple[Any, RunPlan]:
        """Return data in which the trial's window is at its place, and ``plan`` adapted to that data."""
        if trial.cut is None:
            return self._dataset, plan
        task = dataclasses.replace(plan.task, samples=trial.cut)
        epoch = EpochPlan(windows=1, short_window=trial.cut, short_window_policy=plan.epoch.short_window_policy)
        return Subset(self._dataset, range(trial.cut)), dataclasses.replace(plan, task=task, epoch=epoch)

    def samples(self) -> list[list[Any]]:
        """Return each trial's samples in window order, read with each sample's own random numbers."""
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
    """Windows of a stream, in which each rank reads its own share. All ranks must construct it together."""

    def __init__(self, dataset: Any, plan: RunPlan, world: World) -> None:
        self._dataset, self._plan = dataset, plan
        self._sharded = bool(getattr(dataset, "sharded", False))
        batch, size = plan.batch, plan.batch.global_size
        self._sources = world.size if self._sharded else 1
        made_up = short_size(batch)
        # placed after a full window, so that a rank whose share has ended still has data to run with weight zero
        self._cut_at = size + made_up if made_up else None
        parts = [self._gathered(dataset, n, world) for n in range(FULL_WINDOWS)]
        if self._cut_at is not None:
            parts.append(self._gathered(self._cut(self._cut_at, world), 1, world))
        counts = world.of_rank_0([len(samples) for samples in parts])
        self.trials = [
            Trial(f"window {n + 1}{'' if count == size else ', short'}", Place(n, 0, n), count)
            for n, count in enumerate(counts[:FULL_WINDOWS])
            if count
        ]
        if self._cut_at is not None and counts[-1]:
            self.trials.append(Trial("short window, made up", Place(1, 0, 1), counts[-1], self._cut_at))
        self._samples = [samples for samples, count in zip(parts, counts, strict=True) if count]
        self._world = world

    def _gathered(self, dataset: Any, window: int, world: World) -> list[Any]:
        """Return the window's samples on rank 0; on other ranks at most those that the rank itself reads."""
        batch = self._plan.batch
        if self._sharded:
            blocks, count = blocks_of_windows(batch, 0, world.rank), batch.accumulation
        else:  # all ranks have the same stream; rank 0 reads it
            blocks, count = blocks_in_turn(batch.global_size, 1, 0), 1
        found: list[Any] = []
        if self._sharded or world.rank == 0:
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(0)
            shard = Shard(dataset, blocks, list, self._plan.train.seed, 0)
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
    """First samples of a stream."""

    def __init__(self, dataset: Any, samples: int, sharded: bool) -> None:
        self._dataset, self._count, self.sharded = dataset, samples, sharded

    def set_epoch(self, epoch: int) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._count)


def choose(dataset: Any, plan: RunPlan, world: World) -> MapTrials | StreamTrials:
    """Return the windows to verify. All ranks must call it (collective)."""
    return MapTrials(dataset, plan) if plan.task.samples is not None else StreamTrials(dataset, plan, world)


@dataclass(frozen=True)
class Accumulated:
    """One window as run by the engine.

    Attributes:
        gradient: unsharded, on rank 0's host; empty on other ranks.
    """

    trial: Trial
    samples: int
    items: int
    micro_batches: int
    loss: float
    gradient: Gradient


@dataclass(frozen=True)
class Beginning:
    """Model state at the start of training.

    Attributes:
        values: unsharded parameters and buffers, on rank 0's host.
        training: whether each module is in training mode.
        with_data: see ``accumulate``.
    """

    values: dict[str, Tensor]
    training: dict[str, bool]
    with_data: bool


@dataclass(frozen=True)
class Taken:
    """Results of ``accumulate``.

    Attributes:
        windows: windows run before an error, if any.
        refused: error that would end training in the following window; None if there was none.
    """

    beginning: Beginning
    windows: list[Accumulated]
    refused: str | None


class Witness(Optimizer):
    """Optimizer that records gradients and updates nothing: every window is compared at the initial parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, keeps: bool) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._device, self._keeps = device, keeps
        self.taken: list[Tensor | None] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        self.taken = [whole(p.grad, self._device, keep=self._keeps) for p in parameters]


def whole(tensor: Tensor | None, device: torch.device, *, keep: bool) -> Tensor | None:
    """Return a copy on the host of all shards, or None unless ``keep``. All ranks must call it (collective)."""
    if isinstance(tensor, DTensor):
        sharded = cast("DTensor", tensor.to(device))
        tensor = sharded.full_tensor()  # offloaded shards are in host memory, which NCCL cannot access
    return tensor.detach().to("cpu", copy=True) if keep and tensor is not None else None


def in_fp32(plan: RunPlan) -> RunPlan:
    """Return the plan with minimal rounding: fp32 throughout, uncompressed gradients, no compiler."""
    return dataclasses.replace(
        plan,
        precision=dataclasses.replace(
            plan.precision,
            kind=PrecisionKind.fp32,
            reduce_dtype=PrecisionKind.fp32,
            parameters=Parameters.fp32,
            tf32=False,
        ),
        strategy=dataclasses.replace(plan.strategy, compress=Compress.none),
        train=dataclasses.replace(plan.train, compile=False),
    )


def accumulate(plan: RunPlan, world: World, windows: MapTrials | StreamTrials, *, with_data: bool) -> Taken:
    """Run the windows in order on a new engine of ``plan``, each at the initial parameters. All ranks must call it.

    Buffers keep the changes that a window makes, as in training.

    Args:
        with_data: whether ``train_data()`` sets attributes of the task that its other methods may need.
    """
    # disable everything that is not part of a gradient, and let no window be the last of the run
    train = dataclasses.replace(plan.train, clip_norm=None, calibrate_s=0.0, steps=None, epochs=None)
    plan = dataclasses.replace(plan, train=train)
    device = device_of(world, plan.cluster.device)
    keeps = world.rank == 0
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    seed_everything(plan.train.seed)
    witnesses: list[Witness] = []

    def witness(parameters: Iterable[nn.Parameter]) -> Witness:
        witnesses.append(Witness(parameters, device, keeps=keeps))
        return witnesses[0]

    engine = Engine(task.model, witness, plan, shard_units=getattr(task, "shard_units", None))
    if with_data:
        train_data(task, plan.train.seed)
    seed_everything(plan.train.seed + 1 + world.rank)
    module = engine.parallel.module
    taken = Taken(_beginning(module, device, with_data, keep=keeps), [], None)
    for trial in windows.trials:
        dataset, engine.plan = windows.feed(trial, plan)
        with without_dropout(module, functions=not plan.train.compile):
            result = _run(engine, task, trial, dataset)
        if isinstance(result, str):
            return dataclasses.replace(taken, refused=result)
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        # training skips a window without items: it has no gradient and no loss
        grads = witnesses[0].taken if result.items else [None] * len(names)
        gradient = dict(zip(names, grads, strict=True)) if keeps else {}
        loss = result.loss if result.items else 0.0
        taken.windows.append(Accumulated(trial, result.samples, result.items, result.micro_batches, loss, gradient))
    return taken


def _run(engine: Engine, task: Task, trial: Trial, dataset: Any) -> StepResult | str:
    """Run one window, with fp16 until its loss scale has settled; return the error that would end training, if any."""
    loss_of = functools.partial(loss_and_items, task, engine)
    kept = Kept(engine.parallel.module, engine.device)
    of_a_step = (UnusedParameters, NotFinite, PolicyNotObserved, DataError, TaskError)  # raised on all ranks alike
    while True:
        engine.go_to(trial.place)
        opened = cast(
            "Generator[Any]",
            engine.windows(dataset, getattr(task, "collate", None), forward=loss_of, compare_data=False),
        )
        for batch in next(opened):
            engine.backward(*loss_of(engine.model, batch))
        try:
            result = engine.step()
        except of_a_step as error:
            return f"{type(error).__name__}: {error}"
        opened.close()
        if not result.skipped or not result.items:
            return result
        kept.put_back()


def _beginning(module: nn.Module, device: torch.device, with_data: bool, *, keep: bool) -> Beginning:
    values: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if (value := whole(tensor, device, keep=keep)) is not None:
            values[name] = value
    return Beginning(values, {name: part.training for name, part in module.named_modules()}, with_data)
