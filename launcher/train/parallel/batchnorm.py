"""BatchNorm under accumulation: statistics over ranks, and replacement of the layers' forward pass.

The user's layers keep their names, parameters, buffers and class; only their forward pass in training is replaced. So a
checkpoint is that of the plain model, and an evaluation runs torch's own code.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.config.choices import added_value
from launcher.config.schema import Norm, ShortWindow, Sync
from launcher.errors import ConfigError, TaskError
from launcher.plan.batch import ways_out_of_one_value
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from launcher.plan.windows import ANY_NUMBER, Windows
from launcher.train.measure.comm_meter import Meter
from launcher.train.parallel.mixed_precision import in_backward
from launcher.train.precision import Precision

if TYPE_CHECKING:
    from launcher.train.parallel.base import Parallel  # imports torch's compiler, and an inspection this module


@dataclass
class Statistics:
    """Statistics by which a layer normalises.

    Args:
        count: values per channel, a scalar.
        mean: [channels], fp64.
        variance: [channels], fp64, biased (divided by ``count``).
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of_sums(cls, sums: Tensor) -> Statistics:
        """Return the statistics of ``sums`` (see ``sums_of``); mean 0 and variance 1 if no value was counted.

        Args:
            sums: of shape [2 * channels + 1].
        """
        count = sums[-1]
        mean, square = sums[:-1].view(2, -1) / count.clamp(min=1)
        variance = torch.where(count > 0, (square - mean * mean).clamp(min=0), 1.0)
        return cls(count, mean, variance)


def sums_of(x: Tensor, *, counts: bool) -> Tensor:
    """Return sums and sums of squares of each channel and the count of values per channel: [2 * channels + 1], fp64.

    They can be added over micro-batches and ranks, and are zero unless ``counts``. The sum of squares is computed from
    the variance, which would be lost to rounding if the mean is large.
    """
    if not counts:
        return torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // x.shape[1]
    variance, mean = (value.double() for value in torch.var_mean(widened(x), _all_but_channels(x), correction=0))
    number = torch.full((1,), count, dtype=torch.float64, device=x.device)
    return torch.cat((count * mean, count * (variance + mean * mean), number))


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype in which it is normalised: at least fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """Reshape ``value``, [channels], to broadcast over ``x``, [samples, channels, ...], in the dtype of ``x``."""
    return value.to(x.dtype).view(1, -1, *[1] * (x.ndim - 2))


def gradient_sums(gradient: Tensor, normalised: Tensor) -> Tensor:
    """Return the sums of the gradient, and of the gradient times the normalised input: [2, channels] in fp64."""
    dims = _all_but_channels(gradient)
    return torch.stack((gradient.sum(dims), (gradient * normalised).sum(dims))).double()


class Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps), whose gradient includes the path through the statistics.

    With g the gradient of y, and means over all values that the statistics are computed from, the gradient of x is
    (g - mean(g) - y * mean(g * y)) / sqrt(variance + eps): Ioffe & Szegedy 2015, section 3. ``means`` turns the
    ``gradient_sums`` of this call into these two means, [2, channels]; it is None if x is not part of the statistics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, statistics: Statistics, eps: float, means: Callable[[Tensor], Tensor] | None):
        scale = per_channel((statistics.variance + eps).rsqrt(), x)
        y = (x - per_channel(statistics.mean, x)) * scale
        ctx.save_for_backward(y, scale)
        ctx.means = means
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        y, scale = ctx.saved_tensors
        if ctx.means is not None:
            of_gradient, of_product = ctx.means(gradient_sums(gradient, y))
            gradient = gradient - per_channel(of_gradient, y) - y * per_channel(of_product, y)
        return gradient * scale, None, None, None


def normalise(layer: _BatchNorm, x: Tensor, statistics: Statistics, means: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return ``x`` normalised by ``statistics``, without scale and shift; see ``Normalise``."""
    return Normalise.apply(widened(x), statistics, layer.eps, means)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def track(layer: _BatchNorm, statistics: Statistics) -> None:
    """Update the layer's running statistics once; ``statistics`` of no samples leave them unchanged."""
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return
    seen = statistics.count > 0
    layer.num_batches_tracked += seen
    # without a momentum they are the average over all batches so far, as in torch
    so_far = layer.num_batches_tracked.clamp(min=1).double()
    part = seen.double() * (1 / so_far if layer.momentum is None else layer.momentum)
    unbiased = statistics.variance * statistics.count / (statistics.count - 1).clamp(min=1)
    for running, new in ((layer.running_mean, statistics.mean), (layer.running_var, unbiased)):
        running.copy_((1 - part) * running + part * new)


def refusal_of_one_value(error: Exception, model: nn.Module, plan: RunPlan, index: int, place: str) -> TaskError | None:
    """Return the error to raise for ``error`` if a BatchNorm raised it in window ``index`` because it has one value per
    channel, which the plan did not know; None for another one. ``place``: step, rank and samples."""
    if "Expected more than 1 value per channel when training" not in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {id(layer): name for name, layer in batch_norms(model).items()}
    layers = [names[key] for frame in frames if (key := id(frame.f_locals.get("self"))) in names]
    if not layers and not any(frame.f_code is functional.batch_norm.__code__ for frame in frames):
        return None  # a GroupNorm raises the same
    samples, keep_short = plan.task.samples or ANY_NUMBER, plan.epoch.short_window_policy is ShortWindow.exact
    batch = plan.batch.of_all_sites
    size = Windows(samples, batch, keep_short=keep_short).at(index).size
    layer, short = layers[-1] if layers else "of the model", size < batch.global_size_at(index)
    ends = f" An epoch of {samples} samples ends with a window of {size}." if short else ""
    return TaskError(
        f"The BatchNorm {layer} has 1 value per channel in {place}, and one value has no statistics.{ends}\n"
        f"  {ways_out_of_one_value(short=short)}"
    )


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the model's BatchNorm layers by name, SyncBatchNorm included."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


class Ranks:
    """Sum over all ranks, counted by the meter."""

    def __init__(self, meter: Meter, world_size: int) -> None:
        self._meter, self._alone = meter, world_size == 1

    def add_up(self, sums: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if not self._alone:
            with self._meter.blocking(Collective.statistics, sums.nbytes):
                dist.all_reduce(sums)
        return sums


class Norms:
    """Handling of BatchNorm, to which the engine announces micro-batches and steps; this one is that of ``leave``,
    ``freeze``, and models without BatchNorm, where nothing depends on other micro-batches.

    Attributes:
        plain: this one.
        look_ahead: passes over a whole window before its first micro-batch runs: (micro-batches, function that returns
            the scalar of a micro-batch's backward pass, state to restore after each pass); None: there are none.
    """

    plain = True
    look_ahead: Any = None

    def micro_batch(self, *, counts: bool) -> None:
        """Prepare for the next micro-batch of a window. ``counts``: its samples enter the statistics."""

    def trial(self, *, alone: bool) -> None:
        """Prepare for a micro-batch whose results are discarded. ``alone``: no collective may run."""

    def track(self) -> None:
        """Update running statistics after the window's gradient was applied."""


class Normaliser(Norms):
    """Handling of BatchNorm that replaces the layers' normalisation."""

    plain = False

    def normalised(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        """Return ``x``, [samples, channels, ...], normalised, without the layer's scale and shift."""
        raise NotImplementedError


class RankNorms(Normaliser):
    """Handling of ``sync``: each micro-batch is normalised by its statistics over all ranks. torch's SyncBatchNorm does
    the same, but supports neither CPUs nor ranks whose samples do not count."""

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
        if not in_backward():
            track(layer, statistics)

        def means(sums: Tensor) -> Tensor:
            # a collective: ranks whose samples do not count contribute zeros
            mean = add_up(sums if counts else torch.zeros_like(sums)) / statistics.count.clamp(min=1)
            return mean if counts else torch.zeros_like(mean)

        return normalise(layer, x, statistics, means)


def install(model: nn.Module, norms: Normaliser) -> None:
    """Replace the normalisation of the BatchNorm layers of ``model`` in training by that of ``norms``."""
    # not as a decorator: it imports torch's compiler, which would add a second to the inspection of a task
    forward = torch.compiler.disable(_forward)
    for layer in batch_norms(model).values():
        _let_run(layer, functools.partial(forward, layer, norms))


def freeze(model: nn.Module) -> None:
    """Let the BatchNorm layers of ``model`` normalise by their running statistics; scale and shift are trained."""
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
    if not layer.training:  # an evaluation, or the task has put this layer into eval mode
        return type(layer).forward(layer, x)
    layer._check_input_dim(x)
    y = norms.normalised(layer, x)
    if layer.weight is not None:
        y = y * per_channel(layer.weight, y)
    if layer.bias is not None:
        y = y + per_channel(layer.bias, y)
    return y.to(x.dtype)


def require_replaceable(model: nn.Module, plan: RunPlan) -> None:
    """Check that ``batch.norm`` can be applied to this model.

    Raises:
        ConfigError: the model has no BatchNorm, and the plan was made without knowing that.
        TaskError: a layer has its own forward pass, or lacks running statistics under ``freeze``.
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


def norms_of(plan: RunPlan, parallel: Parallel, precision: Precision, device: torch.device) -> Norms:
    """Apply ``batch.norm`` to the model's BatchNorm layers, and return their handling.

    Raises:
        ConfigError, TaskError: it cannot be applied to this model.
    """
    module, norm = parallel.module, plan.batch.norm
    if norm is not Norm.leave:
        require_replaceable(module, plan)
    if norm is Norm.freeze:
        freeze(module)
    if norm in (Norm.leave, Norm.freeze) or not batch_norms(module):
        return Norms()
    ranks = Ranks(parallel.meter, plan.batch.world_size)
    norms: Normaliser
    if norm is Norm.sync or plan.batch.predicted_accumulation == 1:  # then a window is one micro-batch of all ranks
        norms = RankNorms(ranks)
    else:
        made = added_value("batch.norm", norm)
        norms = made(ranks, parallel, precision, device, plan.strategy.sync is Sync.gather_once)
    install(module, norms)
    return norms
