"""All-gather and reduce-scatter for ``fully_shard``: counted, timed, and on CPUs built from sends and receives.

gloo runs a reduce-scatter as an all-reduce, which moves twice the bytes, and blocks the host until it is complete. Its
sends and receives are faster than its all-gather too: a receive that is posted before its send avoids the round trip of
the handshake. So on CPUs each rank sends every other rank its part: (W-1)/W of the payload, which is the minimum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.plan.sync_policy import Collective
from launcher.train.measure.comm_meter import Meter, Timer
from launcher.train.measure.noise_scale import LocalGradNorm

# torch 2.13 renamed these two, and warns if the old names are used
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


STALL_S = 5.0  # a wait that is longer is looked into


class ExchangeWork(dist.Work):
    """Work handle of one exchange: a set of sends and receives in progress."""

    def __init__(self, done: Future[None], exchanger: Exchanger) -> None:
        super().__init__()
        self._done, self._exchanger = done, exchanger

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 (the process group has its own)
        with self._exchanger.meter.waiting():
            wait_s = STALL_S
            while not self._done.done() and not wait_for([self._done], wait_s).done:
                self._exchanger.stalled(id(self))
                wait_s = 1.0
            if wait_s < STALL_S:
                self._exchanger.stalled(None)
            self._done.result()
        return True


class Exchanger:
    """Runner of exchanges of one kind; ``tag`` distinguishes its messages from those of the other kind.

    Args:
        stalled: called every second with a number of an exchange that has taken longer than ``STALL_S``, and with None
            when it has ended.
    """

    def __init__(self, tag: int, meter: Meter, stalled: Callable[[int | None], None]) -> None:
        self._tag, self.meter, self.stalled = tag, meter, stalled
        # gloo cannot report that a send or receive is complete, only block until it is
        self._waiter = ThreadPoolExecutor(1, "exchange")

    def start(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup, timer: Timer, unit: int) -> ExchangeWork:
        """Start to send row ``i`` of ``sent`` to rank ``i`` of ``group`` and to receive row ``i`` of ``received`` from
        it, for every rank but this one. ``timer`` ends when all transfers have. Messages of different ``unit``s are
        not confused, even if ranks run them in different orders."""
        tag = self._tag + 2 * unit
        # in the stand-in for a group that inspections use, of perhaps thousands of ranks, nothing is sent
        ranks = range(group.size()) if dist.get_backend(group) != "fake" else ()
        peers = [peer for peer in ranks if peer != group.rank()]
        works = [dist.irecv(received[peer], group=group, group_src=peer, tag=tag) for peer in peers]
        works += [dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in peers]

        def finish() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            timer.stop()

        return ExchangeWork(self._waiter.submit(finish), self)


class Gather:
    """All-gather of one unit's parameters. On CPUs it is asynchronous, too: torch waits for it when the parameters are
    needed.

    Args:
        stalled: see ``Exchanger``; None: the process group's own collective runs.
    """

    def __init__(self, meter: Meter, stalled: Callable[[int | None], None] | None) -> None:
        self._meter = meter
        self._exchanger = Exchanger(1, meter, stalled) if stalled else None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        covers: int | None = None,
        unit: int = 0,
    ) -> dist.Work | None:
        timer = self._meter.start_timer()
        self._meter.count(Collective.all_gather, output_tensor.nbytes, covers)
        if self._exchanger is not None:
            parts = output_tensor.view(group.size(), -1)
            if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
                parts[group.rank()].copy_(input_tensor.view(-1))
            sent = input_tensor.expand(group.size(), *input_tensor.shape)
            return self._exchanger.start(parts, sent, group, timer, unit)
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        _stop_after(timer, work)
        return work


class Scatter:
    """Reduce-scatter of one unit's gradients. On CPUs one is in progress at a time: this keeps the network busy, and
    the memory for received parts small and constant.

    Args:
        stalled: see ``Gather``.
    """

    def __init__(self, meter: Meter, own: LocalGradNorm, stalled: Callable[[int | None], None] | None) -> None:
        self._meter, self._own_gradient = meter, own
        self._exchanger = Exchanger(2, meter, stalled) if stalled else None
        self._pending: tuple[ExchangeWork, Callable[[], object]] | None = None
        self._between_replicas: Timer | None = None
        self.defers = False  # the sum may be computed later, by `finish`
        self.then_all_reduces = False  # an all-reduce between replicas follows

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
        unit: int = 0,
    ) -> dist.Work | None:
        self._own_gradient.take([input_tensor])
        work: dist.Work | None = None
        if self._exchanger is not None:
            self._exchange(self._exchanger, output_tensor, input_tensor.view(group.size(), -1), group, unit)
        else:
            timer = self._meter.start_timer()
            self._meter.count(Collective.reduce_scatter, input_tensor.nbytes)
            work = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            _stop_after(timer, work)
        if self.then_all_reduces:
            self._between_replicas = self._meter.start_timer()
        return work

    def _exchange(
        self, exchanger: Exchanger, output: Tensor, parts: Tensor, group: dist.ProcessGroup, unit: int
    ) -> None:
        self.finish()
        timer = self._meter.start_timer()
        self._meter.count(Collective.reduce_scatter, parts.nbytes)
        received = torch.empty_like(parts)
        received[group.rank()].copy_(parts[group.rank()])
        work = exchanger.start(received, parts, group, timer, unit)
        self._pending = work, functools.partial(torch.sum, received, 0, out=output)
        if not self.defers:
            self.finish()

    def finish(self) -> None:
        """Wait for the exchange in progress, and sum its parts in the order of ranks, so that the sum is
        reproducible."""
        if self._pending is not None:
            work, add = self._pending
            work.wait()
            add()
            self._pending = None

    def reduced_between_replicas(self, gradients: Tensor) -> None:
        """Count torch's all-reduce between replicas. torch calls this after it, with the reduced gradients."""
        self._meter.count(Collective.all_reduce, gradients.nbytes)
        if self._between_replicas is not None:
            self._between_replicas.stop()
            self._meter.waited_until_now(self._between_replicas)
            self._between_replicas = None


class UnitCollective:
    """A collective of one shard unit. ``unit``: its number."""

    def __init__(self, collective: Gather | Scatter, unit: int) -> None:
        self._collective, self._unit = collective, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        return self._collective(*args, **kwargs, unit=self._unit)


def _stop_after(timer: Timer, work: dist.Work | None) -> None:
    if work is None:  # the call was synchronous: the host or the current stream has waited
        timer.stop()
    else:
        work.get_future().then(lambda _: timer.stop())
