"""BatchNorm under accumulation: what its layers normalise by, as ``batch.norm`` says.

The layers stay the user's: names, parameters, buffers and class. Only what they do in training is put in place of their
own forward, so that a checkpoint is that of the plain model and an evaluation runs torch's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.config import Norm
from launcher.errors import ConfigError, TaskError
from launcher.plan import RunPlan
from launcher.policy import Collective
from launcher.train.meter import Meter
from launcher.train.moments import Statistics, normalise, per_channel, sums_of, track


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The model's BatchNorm layers by name (SyncBatchNorm is one)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


class Ranks:
    """Adds up over all ranks; counted, as every collective is."""

    def __init__(self, meter: Meter, world_size: int) -> None:
        self._meter, self._alone = meter, world_size == 1

    def add_up(self, sums: Tensor) -> Tensor:
        """In place."""
        if not self._alone:
            flight = self._meter.take_off()
            self._meter.count(Collective.statistics, sums.nbytes)
            with self._meter.waiting():
                dist.all_reduce(sums)
            flight.land()
        return sums


class Norms(Protocol):
    """What the engine tells of its windows, for the sake of the model's BatchNorm layers."""

    def micro_batch(self, *, counts: bool) -> None:
        """Prepare for the next micro-batch of a window. ``counts``: whether its samples do."""
        ...

    def trial(self, *, alone: bool) -> None:
        """Prepare for a micro-batch of which nothing stays. ``alone``: no collective may run."""
        ...

    def track(self) -> None:
        """The window's gradient was applied."""
        ...


class Normaliser(Norms, Protocol):
    """... and does it itself."""

    def normalised(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        """[samples, channels, ...], without the layer's own scale and shift."""
        ...


class AsTheyAre:
    """``leave``, ``freeze``, or no BatchNorm at all: nothing of a layer depends on other micro-batches."""

    def micro_batch(self, *, counts: bool) -> None: ...
    def trial(self, *, alone: bool) -> None: ...
    def track(self) -> None: ...


class OverRanks:
    """``sync``: each micro-batch by the statistics of that micro-batch on all ranks. torch's SyncBatchNorm, which does
    this, refuses a CPU and ranks whose samples do not count."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._counts, self._alone = True, False

    def micro_batch(self, *, counts: bool) -> None:
        self._counts, self._alone = counts, False

    def trial(self, *, alone: bool) -> None:
        self._counts, self._alone = True, alone

    def normalised(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        counts, add_up = self._counts, (lambda sums: sums) if self._alone else self._ranks.add_up
        with torch.no_grad():
            statistics = Statistics.of_sums(add_up(sums_of(x, counts=counts)))
        if not _in_backward():
            track(layer, statistics)

        def means(sums: Tensor) -> Tensor:
            # all ranks take part, those without a sample with nothing
            found = add_up(sums if counts else torch.zeros_like(sums)) / statistics.count.clamp(min=1)
            return found if counts else torch.zeros_like(found)

        return normalise(layer, x, statistics, means)

    def track(self) -> None: ...


def _in_backward() -> bool:
    """Whether this is a forward pass that recompute repeats: its running statistics have been counted."""
    return torch._C._current_graph_task_id() != -1


def install(model: nn.Module, norms: Normaliser) -> None:
    """Let ``norms`` do what the BatchNorm layers of ``model`` do in training."""
    # no decorator: it imports torch's compiler, a second that every `launch` would take for its look at the task
    forward = torch.compiler.disable(_forward)
    for layer in batch_norms(model).values():
        _let_run(layer, functools.partial(forward, layer, norms))


def freeze(model: nn.Module) -> None:
    """Let the BatchNorm layers of ``model`` keep to their running statistics; scale and shift are trained on."""
    for layer in batch_norms(model).values():
        _let_run(layer, functools.partial(_frozen, layer))


def _let_run(layer: nn.Module, forward: Callable[..., Any]) -> None:
    layer.forward = forward


def _is_plain(layer: _BatchNorm) -> bool:
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _frozen(layer: _BatchNorm, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    statistics = layer.running_mean, layer.running_var
    return functional.batch_norm(x, *statistics, layer.weight, layer.bias, training=False, eps=layer.eps)


def _forward(layer: _BatchNorm, norms: Normaliser, x: Tensor) -> Tensor:
    if not layer.training:  # an evaluation, or the task keeps this layer so
        return type(layer).forward(layer, x)
    layer._check_input_dim(x)
    y = norms.normalised(layer, x)
    if layer.weight is not None:
        y = y * per_channel(layer.weight, y)
    if layer.bias is not None:
        y = y + per_channel(layer.bias, y)
    return y.to(x.dtype)


def require_replaceable(model: nn.Module, plan: RunPlan) -> None:
    """That ``batch.norm`` can be had of this model.

    Raises:
        ConfigError: it has no BatchNorm, and nothing has said so before.
        TaskError: a layer has a forward pass of its own kind, or lacks the running statistics that it is to keep.
    """
    layers, norm = batch_norms(model), plan.batch.norm
    if not layers and plan.task.batch_norms is None:
        raise ConfigError("batch.norm", norm, "has no effect: the model has no BatchNorm.", "Leave it out.")
    for name, layer in layers.items():
        if not _is_plain(layer):
            raise TaskError(
                f"batch.norm={norm.value}: {name} is a {type(layer).__name__}, whose forward pass is not BatchNorm's "
                "own and cannot be replaced.\n  Use batch.norm=leave, or a plain BatchNorm."
            )
        if norm is Norm.freeze and layer.running_mean is None:
            raise TaskError(
                f"batch.norm=freeze: {name} has no running statistics (track_running_stats=False).\n"
                "  Use another batch.norm, or let the layer track them."
            )
