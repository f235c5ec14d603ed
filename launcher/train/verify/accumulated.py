"""The engine's side: the gradients that it would hand to the optimizer, of the job's own windows and strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from launcher.config import Compress, Parameters, PrecisionKind
from launcher.errors import DataError, NotFinite, PolicyNotObserved, TaskError, UnusedParameters
from launcher.plan import RunPlan
from launcher.train.engine import Engine
from launcher.train.kept import Kept
from launcher.train.loop import loss_and_items
from launcher.train.randomness import seed_everything
from launcher.train.step import StepResult
from launcher.train.task import Task, load_task, train_data
from launcher.train.verify.measure import Gradient
from launcher.train.verify.still import without_dropout
from launcher.train.verify.trials import MapTrials, StreamTrials, Trial
from launcher.train.world import World, device_of


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
