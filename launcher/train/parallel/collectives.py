"""All-gather and reduce-scatter for ``fully_shard``: counted, timed, and on CPUs built from sends and receives.

gloo runs a reduce-scatter as an all-reduce, which moves twice the bytes, and blocks the host until it is complete. Its
sends and receives are faster than its all-gather too: a receive that is posted before its send avoids the round trip of
the handshake. So on CPUs each rank sends every other rank its part: (W-1)/W of the payload, which is the minimum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.plan.sync_policy import Collective
from launcher.train.measure.comm_meter import Meter, Timer
from launcher.train.measure.noise_scale import LocalGradNorm
from launcher.train.parallel.block_codec import RowCodec

# torch 2.13 renamed these two, and warns if the old names are used
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ExchangeWork(dist.Work):
    """Work handle of one exchange: a set of sends and receives in progress."""

    def __init__(self, done: Future[None], meter: Meter) -> None:
        super().__init__()
        self._done, self._meter = done, meter

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 (the process group has its own)
        with self._meter.waiting():
            self._done.result()
        return True


class Exchanger:
    """Runner of exchanges of one kind; ``tag`` distinguishes its messages from those of other kinds."""

    def __init__(self, tag: int, meter: Meter) -> None:
        self._tag, self.meter = tag, meter
        # gloo cannot report that a send or receive is complete, only block until it is
        self._waiter = ThreadPoolExecutor(1, "exchange")

    def start(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup, timer: Timer) -> ExchangeWork:
        """Start to send row ``i`` of ``sent`` to rank ``i`` of ``group`` and to receive row ``i`` of ``received`` from
        it, for every rank but this one. ``timer`` ends when all transfers have."""
        # in the stand-in for a group that inspections use, of perhaps thousands of ranks, nothing is sent
        ranks = range(group.size()) if dist.get_backend(group) != "fake" else ()
        peers = [peer for peer in ranks if peer != group.rank()]
        works = [dist.irecv(received[peer], group=group, group_src=peer, tag=self._tag) for peer in peers]
        works += [dist.isend(sent[peer], group=group, group_dst=peer, tag=self._tag) for peer in peers]

        def finish() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            timer.stop()

        return ExchangeWork(self._waiter.submit(finish), self.meter)


class _DecodingWork(dist.Work):
    """Work handle of an all-gather whose numbers are decoded when it is waited for."""

    def __init__(self, work: dist.Work, decode: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._decode = work, decode

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        self._work.wait()
        self._decode()
        return True


class Gather:
    """All-gather of one unit's parameters. On CPUs it is asynchronous, too: torch waits for it when the parameters are
    needed.

    Attributes:
        exact: gather quantised parameters as they are.
    """

    def __init__(self, meter: Meter, *, exchanges: bool) -> None:
        self._meter = meter
        self._exchanger = Exchanger(1, meter) if exchanges else None
        self.exact = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        covers: int | None = None,
        row: RowCodec | None = None,
    ) -> dist.Work | None:
        if row is None or self.exact:
            return self._gather(output_tensor, input_tensor, group, async_op, covers)
        sent = row.encode(input_tensor.view(1, -1))[0]
        received = torch.empty(group.size() * row.sent_bytes, dtype=torch.uint8, device=sent.device)

        def decode() -> None:  # this rank's own numbers, too: all ranks have the same parameters
            row.decode(received.view(group.size(), -1), output_tensor.view(group.size(), -1))

        work = self._gather(received, sent, group, async_op, covers)
        if work is not None:
            return _DecodingWork(work, decode)
        decode()
        return None

    def _gather(
        self, output: Tensor, sent: Tensor, group: dist.ProcessGroup, async_op: bool, covers: int | None
    ) -> dist.Work | None:
        timer = self._meter.start_timer()
        self._meter.count(Collective.all_gather, output.nbytes, covers)
        if self._exchanger is not None:
            parts = output.view(group.size(), -1)
            if parts[group.rank()].data_ptr() != sent.data_ptr():
                parts[group.rank()].copy_(sent.view(-1))
            return self._exchanger.start(parts, sent.expand(group.size(), *sent.shape), group, timer)
        work = _all_gather(output, sent, group=group, async_op=async_op)
        _stop_after(timer, work)
        return work


class Scatter:
    """Reduce-scatter of one unit's gradients. On CPUs one is in progress at a time: this keeps the network busy, and
    the memory for received parts small and constant."""

    def __init__(self, meter: Meter, own: LocalGradNorm, *, exchanges: bool) -> None:
        self._meter, self._own_gradient = meter, own
        self._exchanger = Exchanger(2, meter) if exchanges else None
        self._pending: tuple[ExchangeWork, Callable[[], object]] | None = None
        self._between_replicas: Timer | None = None
        self.defers = False  # the sum may be computed later, by `finish`
        self.sends_on = False  # an all-reduce between replicas follows

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
        row: RowCodec | None = None,
    ) -> dist.Work | None:
        self._own_gradient.take([input_tensor])
        work: dist.Work | None = None
        if row is not None and row.nbytes * group.size() != input_tensor.nbytes:
            row = None  # a parameter has no gradient: the window will be refused
        if self._exchanger is not None:
            self._exchange(self._exchanger, output_tensor, input_tensor.view(group.size(), -1), group, row)
        elif row is not None:
            self._all_to_all(output_tensor, input_tensor.view(group.size(), -1), group, row)
        else:
            timer = self._meter.start_timer()
            self._meter.count(Collective.reduce_scatter, input_tensor.nbytes)
            work = _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
            _stop_after(timer, work)
        if self.sends_on:
            self._between_replicas = self._meter.start_timer()
        return work

    def _exchange(
        self, exchanger: Exchanger, output: Tensor, parts: Tensor, group: dist.ProcessGroup, row: RowCodec | None
    ) -> None:
        self.finish()
        sent = parts if row is None else row.encode(parts)
        timer = self._meter.start_timer()
        self._meter.count(Collective.reduce_scatter, sent.nbytes)
        received = torch.empty_like(sent)
        if row is None:
            received[group.rank()].copy_(parts[group.rank()])
            add = functools.partial(torch.sum, received, 0, out=output)
        else:
            add = functools.partial(_add_decoded, row, received, parts[group.rank()].clone(), group.rank(), output)
        self._pending = exchanger.start(received, sent, group, timer), add
        if not self.defers:
            self.finish()

    def _all_to_all(self, output: Tensor, parts: Tensor, group: dist.ProcessGroup, row: RowCodec) -> None:
        sent = row.encode(parts)
        received = torch.empty_like(sent)
        timer = self._meter.start_timer()
        self._meter.count(Collective.reduce_scatter, sent.nbytes)
        dist.all_to_all_single(received, sent, group=group)
        timer.stop()
        _add_decoded(row, received, parts[group.rank()], group.rank(), output)

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
    """A collective of one shard unit, whose rows are sent as ``row()`` encodes them."""

    def __init__(self, collective: Gather | Scatter, row: Callable[[], RowCodec | None]) -> None:
        self._collective, self._row = collective, row

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._collective.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        return self._collective(*args, **kwargs, row=self._row())


def _add_decoded(row: RowCodec, received: Tensor, own: Tensor, rank: int, output: Tensor) -> None:
    """Write the sum of the rows of all ranks to ``output``, in fp32 and in the order of ranks. This rank's ``own`` was
    not sent, and is exact."""
    decoded = torch.empty_like(output)
    for peer, sent in enumerate(received.unsqueeze(1)):
        if peer != rank:
            row.decode(sent, decoded.view(1, -1))
        numbers = own if peer == rank else decoded
        output.add_(numbers) if peer else output.copy_(numbers)


def _stop_after(timer: Timer, work: dist.Work | None) -> None:
    if work is None:  # the call was synchronous: the host or the current stream has waited
        timer.stop()
    else:
        work.get_future().then(lambda _: timer.stop())
