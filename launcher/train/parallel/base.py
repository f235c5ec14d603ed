"""Interface of the parallel strategies, so that no other module has to know which one is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm

from launcher.config.schema import Compress, Sync
from launcher.errors import UnusedParameters
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Layout
from launcher.quantities import first_names
from launcher.train.measure.comm_meter import Meter
from launcher.train.measure.noise_scale import LocalGradNorm
from launcher.train.measure.observer import Observer
from launcher.train.parallel.model_check import registered_again
from launcher.train.precision import NARROW_DTYPES

# most micro-batches whose gradients are added up in the format of narrow parameters; more take the memory of fp32 sums
MOST_NARROW = 8

ShardUnits = Callable[[nn.Module], Sequence[nn.Module]]


class Parallel:
    """A model wrapped by a strategy. This class is the strategy for one rank, with nothing to synchronise; those for
    several ranks derive from it.

    Args:
        module: the user's model.
        meter: counts and times the collectives that this strategy runs.
        averaged_over: number of ranks over which the collectives average the gradients; 1 if they sum.
        local_norm: norm of this rank's gradient before the reduction, for the gradient noise scale.
        frozen: parameters whose gradients are computed and reduced, but left out of the norm and the optimizer step.
        observers: what the strategy itself observes in each window.
        last_window: the window that begins next, or is under way, is the run's last one.
    """

    averaged_over = 1
    observers: Sequence[Observer] = ()
    last_window = False

    def __init__(self, model: nn.Module, plan: RunPlan, device: torch.device, layout: Layout | None = None) -> None:
        """Set up what all strategies have.

        Args:
            layout: payload of the strategy's collectives. Default: whole gradients, all-reduced over all ranks.
        """
        self.module = model
        self._parameters = trained(model)
        self._compress = plan.strategy.compress
        self._long = plan.batch.accumulation > MOST_NARROW or plan.batch.may_exceed_plan
        # some gradients would be added up in a narrow format
        self._narrow_sums = self._compress is Compress.bf16 or (
            self._long and any(p.dtype in NARROW_DTYPES for p in self._parameters)
        )
        self._unused_allowed = plan.strategy.find_unused_parameters
        self.frozen: set[nn.Parameter] = set()
        self._left_out: list[tuple[nn.Parameter, Tensor]] = []  # frozen ones of this window, with their gradients
        self._sums = WideSums()
        layout = layout or Layout.replicated(sum(p.nbytes for p in self._parameters), plan.batch.world_size)
        self.meter = Meter(plan.strategy.kind, layout, device)
        self.local_norm = LocalGradNorm()

    def begin_window(self) -> None:
        """Discard gradients that passes outside of windows have left, such as those of another model's loss."""
        if any(parameter.grad is not None for parameter in self._parameters):
            self.zero_grad()

    def end_step(self) -> None:
        """Check parameters after the optimizer step, and after the callbacks that may have written them."""

    def micro_batch(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        """Return the context for forward *and* backward of one micro-batch.

        Args:
            first: the micro-batch is the first of its window.
            last: it is the window's boundary.
        """
        if self._narrow_sums:
            if not first:
                self._sums.move_in(self._summed_wide(sync))
            if last and sync is not Sync.every:
                self._sums.move_back()  # the boundary's backward pass may reduce the sum
        return self._synchronised(sync, first=first, last=last)

    def _synchronised(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def _summed_wide(self, sync: Sync) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients are added up outside of ``grad``, in fp32."""
        if sync is Sync.every and self._compress is Compress.bf16:  # the sum so far would be rounded and sent each time
            return self._parameters
        return [p for p in self._parameters if p.dtype in NARROW_DTYPES] if self._long else ()

    def abandon(self) -> None:
        """Discard the current window, none of whose passes has reduced gradients yet."""
        self.zero_grad()

    def backward(self, loss: Tensor, items: Callable[[], float] | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context for the backward pass of a micro-batch's loss.

        A loss that uses gradients itself, such as a gradient penalty, runs further backward passes outside of it.

        Args:
            loss: what the backward pass starts from.
            items: only in the window's last micro-batch: function that waits for the number of items in the window on
                all ranks, and returns it.
        """
        return self._take_local_norm() if self.local_norm.due else nullcontext()

    @contextmanager
    def _take_local_norm(self) -> Iterator[None]:
        yield
        self.local_norm.take([p.grad for p in self._parameters if p.grad is not None])

    def without_collectives(self) -> AbstractContextManager[object]:
        """Return a context for forward and backward passes without any collective. Their gradients are discarded at
        its end. Collectives that the passes depend on (FSDP's all-gathers) run on entering."""
        raise AssertionError("one rank has no collective to leave out")

    def bytes_to_gather(self) -> int:
        """Return the bytes of the device that ``without_collectives`` takes when it is entered."""
        return 0

    def without_effects(self) -> AbstractContextManager[object]:
        """Return a context, between two windows, for passes that must have no effect on later training."""
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        """Wait for all gradients of the window, and return this rank's part of them.

        Raises:
            TaskError: a parameter has none, because the forward pass has replaced it.
            UnusedParameters: a parameter has none, and ``strategy.find_unused_parameters`` is false.
        """
        if self._narrow_sums:
            self._sums.move_back()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) < len(self._parameters):
            own = set(self._parameters)
            if names := [name for name, p in self.module.named_parameters() if p.requires_grad and p not in own]:
                raise registered_again(names)
        if len(gradients) < len(self._parameters) and not self._unused_allowed:
            names = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
            raise UnusedParameters(
                f"The loss does not depend on {len(names)} of the model's parameters: {first_names(names, 8)}.\n"
                "  Freeze them (requires_grad_(False)), use them in the loss, or set "
                "strategy=ddp strategy.sync=every strategy.find_unused_parameters=true."
            )
        if self.frozen:
            self._left_out = [(p, p.grad) for p in self._parameters if p in self.frozen and p.grad is not None]
            for parameter, _ in self._left_out:
                parameter.grad = None  # optimizers take no step for a parameter without a gradient
            gradients = [p.grad for p in self._parameters if p.grad is not None]
        return gradients

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, of which ``gradients`` is this rank's part: a scalar, the same on all
        ranks."""
        return get_total_norm(gradients)

    def replica_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that hold the same parameters as this one; None: no other rank does."""
        return None

    def zero_grad(self) -> None:
        for parameter, gradient in self._left_out:
            parameter.grad = gradient
        self._left_out = []
        if self._narrow_sums:
            self._sums.clear()
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def evaluation(self) -> AbstractContextManager[object]:
        """Return a context for forward passes of ``module`` between two windows."""
        return nullcontext()

    def set_mode(self, part: nn.Module, training: bool) -> None:
        """Call ``train`` or ``eval`` of ``part``, which is ``module`` or one of its modules. All ranks call it, between
        two windows."""
        part.train() if training else part.eval()

    def partial_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the window so far, at fixed places in the list; None where there is none."""
        return [parameter.grad for parameter in self._parameters]

    def written(self) -> dict[str, int]:
        """Return how often each trained parameter was written in place, by name."""
        names = (name for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        return {name: times_written(p) for name, p in zip(names, self._parameters, strict=False)}

    def leaves(self) -> list[Tensor]:
        """Return the parameters as they are in the graph of a loss."""
        return [*self.module.parameters()]

    def gradient_order(self) -> list[str]:
        """Return the parameters' names in the order in which their gradients are reduced; empty if the first window
        does not determine it, or if it does not affect rounding. All ranks call it."""
        return []

    def take_gradient_order(self, names: list[str]) -> None:
        """Reduce the gradients in this order from the first window on. All ranks call it, before the first window."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that a checkpoint needs in addition to the model."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` has returned."""


class WideSums:
    """Sums of a window's gradients in fp32, for gradients that are computed or reduced in a narrower format.

    In bf16 a running sum stops to grow at 256 times what is added to it.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def move_in(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients to the sums, and set them to zero."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if (total := self._sums.get(parameter)) is None:
                self._sums[parameter] = wide_copy(gradient)
            else:
                total += gradient
            gradient.zero_()

    @torch.no_grad()
    def move_back(self) -> None:
        """Add the sums to the gradients, rounded once."""
        for parameter, total in self._sums.items():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradient.copy_(total + gradient)
        self.clear()

    def clear(self) -> None:
        self._sums.clear()


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor was written in place: as a whole, or this rank's part of it."""
    part = local(tensor)
    return tensor._version if part is tensor else tensor._version + part._version


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_region(of: DTensor) -> tuple[slice, ...]:
    """Return the region of the whole tensor that this rank holds; it may be empty."""
    sizes, offsets = compute_local_shape_and_global_offset(of.shape, of.device_mesh, of.placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def wide_copy(tensor: Tensor) -> Tensor:
    """Return a copy, in fp32 if the format is narrower: small changes would be lost to rounding."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
