"""One face for every strategy: wrap, choose which micro-batch synchronises, hold the gradients. No `if ddp` elsewhere.

Annotations are evaluated here, unlike elsewhere: DDP compares those of the communication hook with its own classes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from launcher.config import StrategyKind
from launcher.errors import EngineMisuse, UnusedParameters
from launcher.plan import RunPlan
from launcher.train.meter import Meter


class Parallel(Protocol):
    """``forward``: what the training loop calls. ``module``: the user's model, for evaluation and checkpoints."""

    forward: Callable[..., Any]
    module: nn.Module
    parameters: list[nn.Parameter]

    def micro_batch(self, synchronise: bool) -> AbstractContextManager[object]:
        """Around forward *and* backward of one micro-batch."""
        ...

    def gradients(self) -> list[Tensor]:
        """Those of the whole window, averaged over the ranks, after the boundary."""
        ...

    def zero_grad(self) -> None: ...


def wrap(model: nn.Module, plan: RunPlan, device: torch.device) -> tuple[Parallel, Meter]:
    """``model`` (on its device) as the plan's strategy has it, and the meter of its collectives."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    world_size = plan.batch.world_size
    meter = Meter(sum(p.numel() * p.element_size() for p in parameters), world_size)
    if plan.strategy.kind is StrategyKind.single or world_size == 1:
        return Single(model, parameters, unused_allowed=plan.strategy.find_unused_parameters), meter
    return Ddp(model, parameters, plan, device, meter), meter


def require_all_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """The norm, the clip and the loss scale are those of all gradients, so none may be left to somebody else."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise EngineMisuse(
            f"The optimizer has not all of the model's trained parameters: {', '.join(left_out[:8])} and so on.\n"
            "  Give it all of them, or freeze the others (requires_grad_(False)) before the engine is made."
        )


class Single:
    """One rank: nothing to synchronise."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], *, unused_allowed: bool) -> None:
        self.module, self.forward, self.parameters = model, model, parameters
        self._unused_allowed = unused_allowed

    def micro_batch(self, synchronise: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return _gradients(self.module, self.parameters, unused_allowed=self._unused_allowed)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Ddp:
    """A whole model on each rank. Gradients live in DDP's buckets, so that they exist once."""

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], plan: RunPlan, device: torch.device, meter: Meter
    ) -> None:
        self.module, self.parameters, self._meter = model, parameters, meter
        self._unused_allowed = plan.strategy.find_unused_parameters
        strategy = plan.strategy
        self.forward = self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=strategy.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=strategy.static_graph,
            find_unused_parameters=strategy.find_unused_parameters,
        )
        self._ddp.register_comm_hook(None, self._hook)

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # noqa: ARG002
        gradients = bucket.buffer()
        self._meter.count(gradients.numel() * gradients.element_size())
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]

    def micro_batch(self, synchronise: bool) -> AbstractContextManager[object]:
        # DDP decides in forward, so the context must be open before it
        return nullcontext() if synchronise else self._ddp.no_sync()

    def gradients(self) -> list[Tensor]:
        return _gradients(self.module, self.parameters, unused_allowed=self._unused_allowed)

    def zero_grad(self) -> None:
        # in place: setting them to None would give the buckets a second copy during the next window
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


def _gradients(module: nn.Module, parameters: list[nn.Parameter], *, unused_allowed: bool) -> list[Tensor]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if len(gradients) < len(parameters) and not unused_allowed:
        names = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UnusedParameters(
            f"The loss does not depend on {len(names)} of the model's parameters: {shown}.\n"
            "  Freeze them (requires_grad_(False)), use them in the loss, or take "
            "strategy.sync=every strategy.find_unused_parameters=true."
        )
    return gradients
