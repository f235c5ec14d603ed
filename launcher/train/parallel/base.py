"""One face for every strategy: wrap, choose which collectives a micro-batch runs, hold the gradients. No `if ddp`
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from launcher.config.schema import Sync
from launcher.errors import UnusedParameters
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Layout
from launcher.train.measure.comm_meter import Meter
from launcher.train.measure.noise_scale import OwnGradient

ShardUnits = Callable[[nn.Module], Sequence[nn.Module]]


class Parallel(Protocol):
    """A wrapped model.

    Args:
        forward: what the training loop calls.
        module: the user's model, for evaluation and checkpoints.
        meter: of the collectives that this strategy runs.
        averaged_over: how many ranks' gradients the collectives have averaged; 1 where they sum.
        own: what this rank's gradient was before they ran.
    """

    forward: Callable[..., Any]
    module: nn.Module
    meter: Meter
    averaged_over: int
    own: OwnGradient

    def micro_batch(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        """Around forward *and* backward of one micro-batch: the first of its window, the last, or one between."""
        ...

    def silent_until_boundary(self, sync: Sync) -> bool:
        """Whether a window's passes run no collective before its last backward pass."""
        ...

    def abandon(self) -> None:
        """Forget the passes of a window that were silent so far."""
        ...

    def before_backward(self) -> None:
        """Called before each micro-batch's backward pass; the loss may have had backward passes of its own."""
        ...

    def before_reduction(self, items: Callable[[], int]) -> None:
        """Called before the window's last backward pass. ``items``: waits for how many the window has on all ranks."""
        ...

    def silent(self) -> AbstractContextManager[object]:
        """Return a context for forward and backward passes without any collective. Their gradients are thrown away at
        its end; what must be sent before is sent on entering."""
        ...

    def trial(self) -> AbstractContextManager[object]:
        """Return a context, between two windows, for passes that must not change what training does after it."""
        ...

    def gradients(self) -> list[Tensor]:
        """This rank's part of the window's gradients, once all of them have arrived."""
        ...

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole gradient, of which ``gradients`` is this rank's part: a scalar, alike on all ranks."""
        ...

    def zero_grad(self) -> None: ...
    def evaluation(self) -> AbstractContextManager[object]:
        """Around forward passes of ``module`` between two windows."""
        ...

    def gradient_order(self) -> list[str]:
        """Names of the parameters in the order in which their gradients travel, where that was found out by the first
        window and decides how sums are rounded. All ranks call it."""
        ...

    def take_gradient_order(self, names: list[str]) -> None:
        """Let the gradients travel in this order from the first window on. All ranks call it, of a fresh model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of this rank, beside the model."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def payload_of_gradients(model: nn.Module) -> int:
    """Bytes of all gradients, each in its parameter's own format."""
    return sum(parameter.numel() * parameter.element_size() for parameter in trained(model))


def whole_gradients(module: nn.Module, parameters: Sequence[nn.Parameter], *, unused_allowed: bool) -> list[Tensor]:
    """Return the gradients of ``parameters``, those of ``module`` that are trained.

    Raises:
        UnusedParameters: some have none.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if len(gradients) < len(parameters) and not unused_allowed:
        names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UnusedParameters(
            f"The loss does not depend on {len(names)} of the model's parameters: {shown}.\n"
            "  Freeze them (requires_grad_(False)), use them in the loss, or take "
            "strategy=ddp strategy.sync=every strategy.find_unused_parameters=true."
        )
    return gradients


class Single:
    """One rank: nothing to synchronise."""

    averaged_over = 1

    def __init__(self, model: nn.Module, plan: RunPlan, device: torch.device) -> None:
        self.module = self.forward = model
        self._unused_allowed = plan.strategy.find_unused_parameters
        self.meter = Meter(plan.strategy.kind, Layout.replicated(payload_of_gradients(model), 1), device)
        self.own = OwnGradient()

    @contextmanager
    def micro_batch(self, sync: Sync, *, first: bool, last: bool) -> Iterator[None]:  # noqa: ARG002
        self.own.await_part(due=first and not last)
        yield
        if self.own.due:  # a part of the window by itself, though no other rank has the rest
            self.own.take([p.grad for p in trained(self.module) if p.grad is not None])

    def silent_until_boundary(self, sync: Sync) -> bool:  # noqa: ARG002
        return True

    def abandon(self) -> None:
        self.zero_grad()

    def before_backward(self) -> None: ...
    def before_reduction(self, items: Callable[[], int]) -> None: ...
    def silent(self) -> AbstractContextManager[object]:
        raise AssertionError("one rank has no collective to leave out")

    def trial(self) -> AbstractContextManager[object]:
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return whole_gradients(self.module, trained(self.module), unused_allowed=self._unused_allowed)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return get_total_norm(gradients)

    def zero_grad(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def evaluation(self) -> AbstractContextManager[object]:
        return nullcontext()

    def gradient_order(self) -> list[str]:
        return []

    def take_gradient_order(self, names: list[str]) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
