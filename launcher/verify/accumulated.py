"""The engine's side: gradients that it would hand to the optimizer, of the windows that are verified."""

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

# DDP lays its buckets out anew after the first window: the second is another code path
FULL_WINDOWS = 2


@dataclass(frozen=True)
class Trial:
    """A window to verify: ``size`` samples at ``place``. ``cut``: how many samples the data is cut to, so that its last
    window is a short one; None for the data as it is."""

    name: str
    place: Place
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
            Trial(f"window {n + 1}", Place(n, 0, n), plan.batch.global_size) for n in range(full)
        ]  # fmt: skip
        made_up = short_size(plan.batch)
        if short:
            last = windows - 1
            self.trials.append(Trial(f"window {windows}, short", Place(last, 0, last), short))
        elif plan.epoch.short_window_policy is ShortWindow.exact and made_up:
            self.trials.append(Trial("short window, made up", BEGINNING, made_up, cut=made_up))

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
            Trial(f"window {n + 1}{'' if count == size else ', short'}", Place(n, 0, n), count)
            for n, count in enumerate(counts[:FULL_WINDOWS])
            if count
        ]
        if self._cut_at is not None and counts[-1]:
            self.trials.append(Trial("short window, made up", Place(1, 0, 1), counts[-1], self._cut_at))
        self._samples = [samples for samples, count in zip(parts, counts, strict=True) if count]
        self._world = world

    def _gathered(self, dataset: Any, window: int, world: World) -> list[Any]:
        """The window's samples, on rank 0; elsewhere at most those that the rank reads itself."""
        batch = self._plan.batch
        if self._sharded:
            blocks, count = blocks_of_windows(batch, 0, world.rank), batch.accumulation
        else:  # it is every rank's, and rank 0 reads it
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


@dataclass(frozen=True)
class Accumulated:
    """One window as the engine ran it. ``gradient``: whole, on rank 0's host; empty on other ranks."""

    trial: Trial
    samples: int
    items: int
    micro_batches: int
    loss: float
    gradient: Gradient


@dataclass(frozen=True)
class Beginning:
    """The model as training begins with it, whole, on rank 0's host: ``values`` of parameters and buffers, and which
    modules are in training mode. ``with_data``: as ``accumulate`` has it."""

    values: dict[str, Tensor]
    training: dict[str, bool]
    with_data: bool


@dataclass(frozen=True)
class Taken:
    """``refused``: the error that would end training in one of the windows; those before it are here."""

    beginning: Beginning
    windows: list[Accumulated]
    refused: str | None


class Witness(Optimizer):
    """Takes down the gradients that an optimizer would apply, and applies nothing: every window is compared at the
    parameters that training begins with."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, keeps: bool) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._device, self._keeps = device, keeps
        self.taken: list[Tensor | None] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        self.taken = [whole(p.grad, self._device, keep=self._keeps) for p in parameters]


def whole(tensor: Tensor | None, device: torch.device, *, keep: bool) -> Tensor | None:
    """A copy on the host, of all shards; all ranks call it, and get one where they ``keep`` it."""
    if isinstance(tensor, DTensor):
        sharded = cast("DTensor", tensor.to(device))
        tensor = sharded.full_tensor()  # what is offloaded lies where no collective reaches it
    return tensor.detach().to("cpu", copy=True) if keep and tensor is not None else None


def in_fp32(plan: RunPlan) -> RunPlan:
    """The plan with nothing that rounds more than it must: fp32 throughout, gradients sent as they are, no compiler."""
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
    """Run the windows one after the other on a fresh engine of ``plan``, at the parameters that training starts with.
    Buffers keep what a window leaves in them, as in training. All ranks call it.

    Args:
        with_data: whether ``train_data()`` leaves something in the task that its other methods may need.
    """
    # what does not belong into a gradient is left out, and no window is the last one
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
        # a window without items is left out of training: it has no gradient, nor a loss
        grads = witnesses[0].taken if result.items else [None] * len(names)
        gradient = dict(zip(names, grads, strict=True)) if keeps else {}
        loss = result.loss if result.items else 0.0
        taken.windows.append(Accumulated(trial, result.samples, result.items, result.micro_batches, loss, gradient))
    return taken


def _run(engine: Engine, task: Task, trial: Trial, dataset: Any) -> StepResult | str:
    """One window, with fp16 again until its loss scale has settled; or the error with which training would end."""
    loss_of = functools.partial(loss_and_items, task, engine)
    kept = Kept(engine.parallel.module, engine.device)
    of_a_step = (UnusedParameters, NotFinite, PolicyNotObserved, DataError, TaskError)  # on all ranks alike
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
