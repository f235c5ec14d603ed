"""DDP: a whole model on each rank; its gradients are all-reduced bucket by bucket, optionally compressed.

This module does not import `annotations` from `__future__`: DDP compares the annotations of the communication hook with
its own classes, so they must be evaluated.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from launcher.config.choices import added_value
from launcher.config.schema import Compress, Sync
from launcher.errors import TaskError
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import REDUCING_OVER_ALL, Collective
from launcher.train.measure.comm_meter import Meter
from launcher.train.parallel.base import Parallel


class Ddp(Parallel):
    """Strategy for DDP. Gradients are views into DDP's buckets, so that there is one copy of them.

    The forward pass is that of the user's own model: DDP's would only prepare its reducer, which ``micro_batch`` and
    ``backward`` do here. A loss may therefore call any method of the model, in any number of passes. Until ``backward``
    prepares the reducer, gradients are accumulated and not reduced, as under ``no_sync``.

    Args:
        compiled: the engine compiles the model as a whole.
    """

    def __init__(self, model: nn.Module, plan: RunPlan, device: torch.device, *, compiled: bool) -> None:
        super().__init__(model, plan, device)
        strategy, self._world_size = plan.strategy, plan.batch.world_size
        # with either option DDP never rebuilds its buckets, or not in the order of a single backward pass
        self._keeps_buckets = self._unused_allowed or strategy.static_graph
        # None if the next synchronised backward pass must record it; [] if DDP never rebuilds its buckets in that order
        self._order: list[str] | None = [] if self._keeps_buckets else None
        self._plan, self._device = plan, device
        self._compression = _compression(plan, model, self.meter)
        self._keeps_residue = strategy.compress.keeps_residue  # without a call for each bucket
        # blocks that are compiled one by one are reduced one by one without this
        self._compiled, self._reduces = compiled, False
        self._zeroed: list[int] = []  # versions of the gradients when they were set to zero
        self._copies = False  # the first backward pass of the current window copies its gradients into the buckets
        self._shrunk = False  # the gradients are zeros without memory
        self._views: list[tuple[nn.Parameter, Tensor]] = []  # those into the buckets, while the gradients are None
        self._ddp = self._wrapped(init_sync=True)

    def _wrapped(self, *, init_sync: bool) -> DistributedDataParallel:
        strategy = self._plan.strategy
        ddp = DistributedDataParallel(
            self.module,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=strategy.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=strategy.static_graph,
            find_unused_parameters=strategy.find_unused_parameters,
            init_sync=init_sync,
        )
        # the engine broadcasts buffers, under every strategy; as an argument this is deprecated since torch 2.13
        ddp.broadcast_buffers = False
        ddp.register_comm_hook(None, self._hook)
        return ddp

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002
        gradients = bucket.buffer()
        if not self._keeps_residue:  # what it sends differs from the ranks' gradients
            self.local_norm.take([gradients])
        timer = self.meter.start_timer()
        sent, payload, collectives = self._compression.reduce(bucket, self.averaged_over)
        self.meter.reduction_started()
        self.meter.count(Collective.all_reduce, payload, covers=gradients.nbytes, collectives=collectives)

        def finished(done: Future[Any]) -> Tensor:
            timer.stop()
            value = done.value()
            return value[0] if isinstance(value, list) else value

        return sent.then(finished)

    def _synchronised(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        self._sync, self._reduces = sync, last or sync in REDUCING_OVER_ALL  # without a call for each micro-batch
        # under `every` a mean: a bucket also holds the window's earlier micro-batches, already reduced
        sums = self._compression.can_sum and sync is not Sync.every
        self.averaged_over = 1 if sums else self._world_size
        if first and not self._ddp._has_rebuilt_buckets:
            self._attach_gradients()  # DDP moves only gradients that are attached to the old buckets
            if self._order:  # DDP lays them out now
                self._shrink_gradients()
        if not self._ddp._has_rebuilt_buckets:
            self._rebuild_buckets()  # before the forward pass needs memory
        if first:
            self._copies = self._reduces and not self._keeps_buckets
            self._detach_gradients() if self._copies else self._attach_gradients()
        records = self._reduces and self._order is None
        context = self._record_order() if records else nullcontext()
        return self._in_compiled_graphs(context) if self._compiled else context

    @contextmanager
    def _in_compiled_graphs(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """Let ``torch.compile`` split its graphs by buckets, so that reductions overlap with the backward pass."""
        with self._ddp._inside_ddp_forward(), context:
            yield

    def _rebuild_buckets(self) -> None:
        """Lay out the buckets in the order of the first synchronised backward pass, once it has taken place."""
        if self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets, self._views = True, []
        elif self._shrunk:  # that pass did not reach its end
            for parameter in self._parameters:
                parameter.grad = None
        self._shrunk = False

    def backward(self, loss: Tensor, items: Callable[[], float] | None = None) -> AbstractContextManager[None]:
        # under `every`, part of the residue is from this window already
        if items is not None and self._sync is not Sync.every:
            self._compression.before_reduction(items)
        return self._reducing(loss) if self._reduces else nullcontext()

    @contextmanager
    def _reducing(self, loss: Tensor) -> Iterator[None]:
        ddp, reducer = self._ddp, self._ddp.reducer
        reducer.prepare_for_forward()
        # DDP looks for unused parameters from the model's outputs; from the loss, it finds those of unused outputs too
        reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])
        with self.meter.reducing():
            try:
                yield
            except RuntimeError as error:
                if "mark a variable ready only once" not in str(error):
                    raise
                raise self._several_parts(str(error)) from error
            if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
                ddp._static_graph_delay_allreduce_enqueued = True
                # the first backward pass has only recorded the graph
                reducer._delay_all_reduce()  # pyright: ignore[reportAttributeAccessIssue]
        if ddp.find_unused_parameters and not ddp.static_graph:  # DDP's own: which parameters were used, in int32
            self.meter.count(Collective.all_reduce, 4 * len(self._parameters), covers=0)

    def _several_parts(self, error: str) -> TaskError:
        """Return the error for a parameter whose gradient DDP would reduce before it is complete."""
        index = re.search(r"arameter at index (\d+)", error)
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        return TaskError(
            f"The gradient of {names[int(index[1])] if index else 'a parameter'} has several parts, and DDP would "
            "reduce the first one: a reentrant checkpoint\n  is used twice, or shares the parameter.\n"
            "  Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or strategy.static_graph=true."
        )

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        # gradients that the previous pass has set to None would be allocated outside the buckets, as a second copy
        self._reduces = self._copies = False
        self._attach_gradients()
        yield
        self.zero_grad()

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        # the bucket layout decides how sums are rounded: the new reducer must have the layout of the old one
        order, kept = self.gradient_order(), self._compression.state_dict()
        self._compression.begin_trial()
        try:
            yield
        finally:  # no collectives here: an exception may have occurred on this rank only
            for parameter in self.module.parameters():
                parameter.grad = None
            self._views = []  # or the old buckets would be held beside the new ones
            del self._ddp.reducer, self._ddp.logger  # removes the hooks from the parameters and frees the buckets
            vars(self._ddp).update(vars(self._wrapped(init_sync=False)))
            self._order = [] if self._keeps_buckets else None
            self._compression = _compression(self._plan, self.module, self.meter)
            if kept:
                self._compression.load_state_dict(kept)
        self.take_gradient_order(order)

    def _zero_gradients(self) -> None:
        if self._copies:
            self._detach_gradients()
        # in place: set to None, they would be allocated outside the buckets by a pass that is not reduced, as a second
        # copy
        elif gradients := [p.grad for p in self._parameters if p.grad is not None]:
            torch._foreach_zero_(gradients)
        self._zeroed = self._versions()

    def _detach_gradients(self) -> None:
        """Set the gradients to None: DDP copies those of a reduced pass into the buckets, which is faster than to set
        the buckets to zero and to add to them."""
        if not self._views:
            self._views = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None

    def _attach_gradients(self) -> None:
        """Undo ``_detach_gradients``, with gradients of zero."""
        for parameter, view in self._views:
            parameter.grad = view.zero_()
        self._views = []

    def _shrink_gradients(self) -> None:
        """Replace the gradients, which are zero, by zeros without memory of their own: DDP copies them into the new
        buckets when it lays these out, and the old ones are free by then."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.new_zeros(()).expand_as(parameter)
        self._shrunk = True

    def _versions(self) -> list[int]:
        """Return a number for each gradient, which changes when the gradient does."""
        return [p.grad._version for p in self._parameters if p.grad is not None]

    def begin_window(self) -> None:
        if self._versions() != self._zeroed:
            self.zero_grad()

    def gradient_order(self) -> list[str]:
        """Return the order in which gradients became ready in the first synchronised backward pass of this process, or
        of the run that it resumes. DDP lays out its final buckets in that order, and in a ring all-reduce the order of
        summation, hence the rounding, depends on an element's position in the bucket."""
        return self._order or []

    @contextmanager
    def _record_order(self) -> Iterator[None]:
        """Record the order of one synchronised backward pass. DDP has it too, but returns it only together with buckets
        as large as all gradients (``_get_zeros_like_grad_buckets``)."""
        order: list[str] = []

        def recorder(name: str) -> Callable[[Tensor], None]:
            return lambda _: order.append(name)

        named = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(recorder(name)) for name, parameter in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._order = order or None  # none: the micro-batch ran no backward pass, and runs again

    def take_gradient_order(self, names: list[str]) -> None:
        if not names:
            return
        if {*names} != {name for name, p in self.module.named_parameters() if p.requires_grad}:
            return  # others are trained now: the next backward pass determines the order
        # leave the reducer as after a backward pass in this order, with zero gradients
        parameters, reducer = dict(self.module.named_parameters()), self._ddp.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        for name in names:
            parameters[name].view_as(parameters[name]).backward(torch.zeros_like(parameters[name]))
        self._shrink_gradients()
        self._rebuild_buckets()
        self._order = names
        self.zero_grad()

    def replica_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def state_dict(self) -> dict[str, Any]:
        return self._compression.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._compression.load_state_dict(state)


class Compression:
    """Reduction of DDP's gradient buckets; this one in their own dtype, or rounded to bf16. One of an installed package
    is made from model, plan and meter; its state has the parts "residue" and "factors", tensors by the
    names of parameters.

    bf16 has the exponent range of fp32, so that small gradients survive. A ring of W ranks rounds each number when it
    is converted, when it is divided by W (in a mean, and unless W is a power of two), and in each of W-1 sums, by up to
    2^-8 relative (half a unit in the last place). To first order the error is at most (W+1) 2^-8 of the mean magnitude,
    sum(|g|)/W; relative to the mean gradient it is larger if the ranks' gradients cancel.

    Attributes:
        can_sum: gradients may be summed instead of averaged.
    """

    can_sum = True

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def reduce(self, bucket: dist.GradBucket, averaged_over: int) -> tuple[Future[Any], int, int]:
        """Start to sum a bucket over the ranks and to divide it by ``averaged_over``.

        Returns:
            The future of the reduced tensor (or of a list with it), the payload bytes, the number of collectives.
        """
        gradients = bucket.buffer()
        sent = gradients.to(self._dtype or gradients.dtype)
        if averaged_over > 1:
            sent.div_(averaged_over)
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None  # this rank is in the group
        done = work.get_future()
        if sent is not gradients:
            done = done.then(lambda done: gradients.copy_(done.value()[0]))
        return done, sent.nbytes, 1

    def before_reduction(self, items: Callable[[], float]) -> None: ...

    def begin_trial(self) -> None:
        """Compress from now on, even if the run's first windows are sent uncompressed."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _compression(plan: RunPlan, model: nn.Module, meter: Meter) -> Compression:
    kind = plan.strategy.compress
    if kind.keeps_residue:
        return added_value("strategy.compress", kind)(model, plan, meter)
    return Compression(None if kind is Compress.none else torch.bfloat16)
