"""Accumulated gradients: the windows to verify, and their gradients as the optimizer would receive them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Subset

from launcher.config.choices import SumFormat
from launcher.config.schema import Compress, OnNonfinite, Parameters, PrecisionKind, ShortWindow
from launcher.errors import (
    CollectiveInLoss,
    DataError,
    NotFinite,
    ReplicasDiffer,
    SyncPolicyViolated,
    TaskError,
    UnusedParameters,
)
from launcher.extensions.verify.comparison import Gradient
from launcher.plan.batch import Batch
from launcher.plan.run_plan import EpochPlan, RunPlan
from launcher.task import Task, load_task, seed_everything, train_data
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.sample_order import ArrangedData, SampleOrder
from launcher.train.data.stream import (
    Rounds,
    StreamShare,
    blocks_in_turn,
    blocks_of_windows,
    is_sharded,
    start_epoch,
)
from launcher.train.data.window_feed import WindowPosition
from launcher.train.engine.engine import Engine
from launcher.train.engine.modes import without_dropout
from launcher.train.engine.preserved_state import SavedState
from launcher.train.engine.replica_check import ReplicaCheck
from launcher.train.engine.window_totals import StepResult
from launcher.train.training_loop import items_method_of, losses_of
from launcher.train.world import World, device_of

# DDP rebuilds its buckets after the first window, so the second one takes a different code path
FULL_WINDOWS = 2
K = TypeVar("K")


@dataclass(frozen=True)
class Trial:
    """Window to verify.

    Attributes:
        position: position of the window in ``dataset``.
        length: number of samples of a ``dataset`` that was cut to have a short window; None for the task's own data.
        samples: the window's samples in order, on rank 0; on other ranks at most those that the rank itself reads.
    """

    name: str
    position: WindowPosition
    dataset: Any
    length: int | None
    samples: list[Any]


def short_size(batch: Batch) -> int:
    """Return the samples of an artificial short window; 0 if a window cannot be short.

    It is over half of a window and, if possible, not a whole number of micro-batches.
    """
    return batch.global_size // 2 + 1 if batch.global_size > 2 else batch.global_size - 1


def choose_windows(dataset: Any, plan: RunPlan, world: World) -> list[Trial]:
    """Return the windows to verify: the first ones, and a short one. All ranks must call it (collective)."""
    choose = _windows_of_stream if plan.task.samples is None else _windows_of_mapped
    return choose(dataset, plan, world)


def _windows_of_mapped(dataset: Any, plan: RunPlan, world: World) -> list[Trial]:
    assert plan.task.samples is not None
    assert plan.epoch.windows is not None
    count, seed, full_size = plan.task.samples, plan.train.seed, plan.batch.global_size

    def trial(name: str, number: int, size: int, length: int | None = None) -> Trial:
        data = dataset if length is None else _beginning(dataset, length)
        first = number * full_size
        indices = SampleOrder(data, length or count, seed, shuffle=plan.train.shuffle).take(0, first, size)
        samples = [*read_mapped(dataset, indices, seed, first)] if world.rank == 0 else []
        return Trial(name, WindowPosition(number, 0, number), data, length, samples)

    short, windows, artificial = plan.epoch.short_window, plan.epoch.windows, short_size(plan.batch)
    trials = [trial(f"window {n + 1}", n, full_size) for n in range(min(FULL_WINDOWS, windows - bool(short)))]
    if short:
        trials.append(trial(f"window {windows}, short", windows - 1, short))
    elif plan.epoch.short_window_policy is ShortWindow.exact and artificial:
        trials.append(trial("artificial short window", 0, artificial, length=artificial))
    return trials


def _beginning(dataset: Any, length: int) -> Any:
    """Return the first samples of a dataset, as many as can be."""
    return dataset.first(length) if isinstance(dataset, ArrangedData) else Subset(dataset, range(length))


def read_mapped(dataset: Any, indices: Iterable[int], seed: int, first: int) -> Iterator[Any]:
    """Yield samples of epoch 0, each read with its own random numbers. ``first``: position of the first one."""
    random = SampleRandom(seed)
    for position, index in enumerate(indices, first):
        with random.own():
            random.seed(0, position)
            sample = dataset[index]
        yield sample


def _windows_of_stream(dataset: Any, plan: RunPlan, world: World) -> list[Trial]:
    size, artificial = plan.batch.global_size, short_size(plan.batch)
    candidates: list[tuple[str, int, Any]] = [(f"window {n + 1}", n, dataset) for n in range(FULL_WINDOWS)]
    if artificial:
        # placed after a full window, so that a rank whose share has ended still has data to run with weight zero
        candidates.append(("artificial short window", 1, _Beginning(dataset, size + artificial, world)))
    trials: list[Trial] = []
    for name, number, data in candidates:
        samples = _read_window(data, number, plan, world)
        if count := world.of_rank_0(len(samples)):
            short = ", short" if data is dataset and count < size else ""
            trials.append(Trial(name + short, WindowPosition(number, 0, number), data, None, samples))
    return trials


def _read_window(dataset: Any, window: int, plan: RunPlan, world: World) -> list[Any]:
    """Return the window's samples on rank 0; on other ranks at most those that the rank itself reads."""
    sharded = is_sharded(dataset)
    if sharded:
        rounds, count = blocks_of_windows(plan.batch, world.rank), plan.batch.accumulation
    elif world.rank == 0:  # all ranks have the same stream
        rounds, count = blocks_in_turn(plan.batch.global_size, 1, 0), 1
    else:
        return []
    own = itertools.islice(read_stream(dataset, rounds, plan.train.seed), window * count, (window + 1) * count)
    samples = [*itertools.chain.from_iterable(own)]
    if not sharded or world.size == 1:
        return samples
    all_ranks: list[Any] = [[]] * world.size
    dist.gather_object(samples, all_ranks if world.rank == 0 else None, 0)
    return [*itertools.chain.from_iterable(all_ranks)]


def read_stream(dataset: Any, rounds: Rounds, seed: int) -> Iterator[list[Any]]:
    """Yield the samples of each of this rank's blocks of ``rounds`` in epoch 0 of a stream."""
    start_epoch(dataset, 0)
    for samples, size, _ in StreamShare(dataset, rounds, list, seed, 0):
        yield samples[:size]


class _Beginning(IterableDataset[Any]):
    """First ``count`` samples of a stream, over all ranks."""

    def __init__(self, dataset: Any, count: int, world: World) -> None:
        self._dataset, self.sharded = dataset, is_sharded(dataset)
        self._count = count // world.size + (world.rank < count % world.size) if self.sharded else count

    def set_epoch(self, epoch: int) -> None:
        start_epoch(self._dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, self._count)


@dataclass(frozen=True)
class EngineWindow:
    """One window as run by the engine.

    Attributes:
        gradient: unsharded, on rank 0's host; empty on other ranks.
    """

    trial: Trial
    result: StepResult
    gradient: Gradient


@dataclass(frozen=True)
class EngineRun:
    """Result of ``run_windows``.

    Attributes:
        values: unsharded parameters and buffers before the first window, on rank 0's host.
        training: whether each module was in training mode then.
        with_data: see ``run_windows``.
        windows: completed windows; fewer than requested if one failed.
        refused: error of the window that failed, as text; None if all completed.
    """

    values: dict[str, Tensor]
    training: dict[str, bool]
    with_data: bool
    windows: list[EngineWindow]
    refused: str | None = None


class _GradientRecorder(Optimizer):
    """Optimizer that records gradients and updates nothing: every window is compared at the initial parameters.

    Attributes:
        gradient: of the last step, by the parameters' positions; empty on ranks other than 0.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world: World, device: torch.device) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._world, self._device = world, device
        self.gradient: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
        self.gradient = _on_rank_0(enumerate(gradients), self._world, self._device)


def _on_rank_0(tensors: Iterable[tuple[K, Tensor]], world: World, device: torch.device) -> dict[K, Tensor]:
    """Return unsharded copies on rank 0's host; nothing on other ranks. All ranks must call it (collective)."""
    copies: dict[K, Tensor] = {}
    for key, tensor in tensors:
        if isinstance(tensor, DTensor):
            sharded = cast("DTensor", tensor.to(device))
            tensor = sharded.full_tensor()  # offloaded shards are in host memory, which NCCL cannot access
        if world.rank == 0:
            copies[key] = tensor.detach().to("cpu", copy=True)
    return copies


def in_fp32(plan: RunPlan) -> RunPlan:
    """Return the plan with minimal rounding: fp32 throughout, nothing compressed, no compiler."""
    return dataclasses.replace(
        plan,
        precision=dataclasses.replace(
            plan.precision,
            kind=PrecisionKind.fp32,
            reduce_dtype=SumFormat.fp32,
            parameters=Parameters.fp32,
            tf32=False,
        ),
        strategy=dataclasses.replace(plan.strategy, compress=Compress.none),
        train=dataclasses.replace(plan.train, compile=False),
    )


def run_windows(plan: RunPlan, world: World, trials: Sequence[Trial], *, with_data: bool) -> EngineRun:
    """Run the windows in order on a new engine of ``plan``, each at the initial parameters. All ranks must call it.

    Buffers keep the changes that a window makes, as in training.

    Args:
        with_data: whether ``train_data()`` sets attributes of the task that its other methods may need.
    """
    # disable everything that is not part of a gradient, and let no window be the last of the run
    train = dataclasses.replace(
        plan.train, clip_norm=None, calibrate_s=0.0, steps=None, epochs=None, on_nonfinite=OnNonfinite.stop
    )
    plan = dataclasses.replace(plan, train=train)
    device = device_of(world, plan.cluster.device)
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    seed_everything(plan.train.seed)
    recorder = functools.partial(_GradientRecorder, world=world, device=device)
    units = getattr(task, "shard_units", None)
    engine = Engine(task.model, recorder, plan, shard_units=units, owner=task, callbacks=())
    if with_data:
        train_data(task, plan.train.seed)
    seed_everything(plan.train.seed + 1 + world.rank)
    module = engine.parallel.module
    values = _on_rank_0([*module.named_parameters(), *module.named_buffers()], world, device)
    run = EngineRun(values, {name: part.training for name, part in module.named_modules()}, with_data, [])
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    for trial in trials:
        engine.plan = _plan_of(trial, plan)
        with without_dropout(module, functions=not plan.train.compile):
            result = _run_window(engine, task, trial)
        if isinstance(result, str):
            return dataclasses.replace(run, refused=result)
        recorder = cast("_GradientRecorder", engine.optimizer)
        if math.isnan(result.loss):  # training skips a window without items: its gradient is zero
            recorder.zero_grad()
            recorder.step()
        gradient = {names[position]: part for position, part in recorder.gradient.items()}
        run.windows.append(EngineWindow(trial, result, gradient))
    return run


def _run_window(engine: Engine, task: Task, trial: Trial) -> StepResult | str:
    """Run one window and return its result, or the error that would end training.

    With fp16 the window runs again until the loss scale is small enough for it.
    """
    loss_of = functools.partial(losses_of, task, engine)
    kept = SavedState(engine.parallel.module, engine.device)
    raised_on_all_ranks = (UnusedParameters, NotFinite, SyncPolicyViolated, DataError, ReplicasDiffer, TaskError)
    while True:
        engine.position = trial.position
        collate = getattr(task, "collate", None)
        stream = cast(
            "Generator[Any]", engine.windows(trial.dataset, collate, loss_of, items_method_of(task), compare_data=False)
        )
        try:
            for batch in next(stream):
                engine.backward(loss_of(engine.model, batch))
        except CollectiveInLoss as error:  # other errors of the passes may be those of one rank
            return f"{type(error).__name__}: {error}"
        try:
            result = engine.step()
            ReplicaCheck(engine).require_same()
        except raised_on_all_ranks as error:
            return f"{type(error).__name__}: {error}"
        stream.close()
        if not result.skipped or math.isnan(result.loss):
            return result
        kept.restore()


def _plan_of(trial: Trial, plan: RunPlan) -> RunPlan:
    """Return ``plan`` for the trial's data."""
    if trial.length is None:
        return plan
    task = dataclasses.replace(plan.task, samples=trial.length)
    epoch = EpochPlan(windows=1, short_window=trial.length, short_window_policy=plan.epoch.short_window_policy)
    return dataclasses.replace(plan, task=task, epoch=epoch)
