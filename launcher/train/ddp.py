"""DDP: a whole model on each rank, its gradients all-reduced bucket by bucket, compressed where that is asked for.

Annotations are evaluated here, unlike elsewhere: DDP compares those of the communication hook with its own classes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from launcher.config import Compress, Sync
from launcher.plan import RunPlan, StrategyPlan
from launcher.policy import Collective, Layout
from launcher.train.meter import Meter
from launcher.train.noise import OwnGradient
from launcher.train.parallel import payload_of_gradients, trained, whole_gradients

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


class Ddp:
    """Gradients live in DDP's buckets, so that they exist once."""

    def __init__(self, model: nn.Module, plan: RunPlan, device: torch.device) -> None:
        strategy, world_size = plan.strategy, plan.batch.world_size
        self.module, self.averaged_over = model, world_size
        self._unused_allowed, self._static_graph = strategy.find_unused_parameters, strategy.static_graph
        self._order: list[str] | None = None
        self.meter = Meter(strategy.kind, Layout.replicated(payload_of_gradients(model), world_size), device)
        self._compression = _compression(strategy, model, self.meter)
        self.own = OwnGradient()
        # what PowerSGD leaves out for later makes of the reduced gradient another one than the mean of the ranks'
        self._comparable = strategy.compress is not Compress.powersgd
        self.forward = self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=strategy.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=strategy.static_graph,
            find_unused_parameters=strategy.find_unused_parameters,
        )
        # the engine's affair, under every strategy; the argument of this name is deprecated since torch 2.13
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(None, self._hook)

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002
        gradients = bucket.buffer()
        self.own.take([gradients])
        flight = self.meter.take_off()
        sent, payload, collectives = self._compression.reduce(bucket)
        self.meter.reduces()
        self.meter.count(Collective.all_reduce, payload, covers=gradients.nbytes, collectives=collectives)

        def landed(done: Future[Tensor]) -> Tensor:
            flight.land()
            return done.value()

        return sent.then(landed)

    def micro_batch(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        self._sync = sync
        self.own.await_part(due=self._comparable and (first if sync is Sync.every else last))
        # DDP decides in forward, so the context must be open before it
        return nullcontext() if last or sync is Sync.every else self._ddp.no_sync()

    def silent_until_boundary(self, sync: Sync) -> bool:
        return sync is not Sync.every

    def abandon(self) -> None:
        # the boundary's forward pass has told DDP to reduce in the backward pass that follows: that is another one now
        self._ddp.reducer._reset_state()
        self.zero_grad()

    def before_reduction(self, items: Callable[[], int]) -> None:
        if self._sync is not Sync.every:  # then part of the residue is of this very window
            self._compression.before_reduction(items)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield
        self.zero_grad()

    def gradients(self) -> list[Tensor]:
        return whole_gradients(self.module, unused_allowed=self._unused_allowed)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return get_total_norm(gradients)

    def zero_grad(self) -> None:
        # in place: setting them to None would give the buckets a second copy during the next window
        if gradients := [p.grad for p in trained(self.module) if p.grad is not None]:
            torch._foreach_zero_(gradients)

    def evaluation(self) -> AbstractContextManager[object]:
        return nullcontext()

    def gradient_order(self) -> list[str]:
        """DDP lays its buckets out by the order in which the first synchronised backward pass came upon the gradients,
        and a ring sums a number's parts in an order that depends on its place in the bucket."""
        if self._order is None:
            reducer = self._ddp.reducer
            if self._static_graph or not (self._ddp._has_rebuilt_buckets or reducer._rebuild_buckets()):
                return []
            self._ddp._has_rebuilt_buckets = True
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            buckets: list[dist.GradBucket] = reducer._get_zeros_like_grad_buckets()
            self._order = [names[p] for bucket in buckets for p in cast("list[nn.Parameter]", bucket.parameters())]
        return self._order

    def take_gradient_order(self, names: list[str]) -> None:
        if not names:
            return
        # as after a backward pass that came upon them in this order; every gradient is zero
        parameters, reducer = dict(self.module.named_parameters()), self._ddp.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        for name in names:
            parameters[name].view_as(parameters[name]).backward(torch.zeros_like(parameters[name]))
        self._ddp._has_rebuilt_buckets = reducer._rebuild_buckets()
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self._compression.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._compression.load_state_dict(state)


class Compression(Protocol):
    def reduce(self, bucket: dist.GradBucket) -> tuple[Future[Tensor], int, int]:
        """Average a bucket over the ranks; the payload bytes of that, and in how many collectives they go."""
        ...

    def before_reduction(self, items: Callable[[], int]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _compression(strategy: StrategyPlan, model: nn.Module, meter: Meter) -> Compression:
    if strategy.compress is Compress.powersgd:
        from launcher.train.powersgd import PowerSgd

        return PowerSgd(model, strategy.powersgd_rank, strategy.powersgd_start, meter)
    hooks: dict[Compress, tuple[Any, int | None]] = {
        Compress.none: (default_hooks.allreduce_hook, None),
        Compress.bf16: (default_hooks.bf16_compress_hook, 2),
        Compress.fp16: (default_hooks.fp16_compress_hook, 2),
    }
    return _Cast(*hooks[strategy.compress])


class _Cast:
    """Gradients as they are, or each one as a narrower number: a relative error of 2^-8 (bf16) or 2^-11 (fp16) a rank
    when it is sent, and as much again in each sum."""

    def __init__(self, hook: Hook, item_bytes: int | None) -> None:
        self._hook, self._item_bytes = hook, item_bytes

    def reduce(self, bucket: dist.GradBucket) -> tuple[Future[Tensor], int, int]:
        gradients = bucket.buffer()
        payload = gradients.numel() * (self._item_bytes or gradients.element_size())
        return self._hook(None, bucket), payload, 1

    def before_reduction(self, items: Callable[[], int]) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
