"""Replay of a window: how long it takes if computation and communication overlap as the strategy lets them.

A rank has a computation stream and two communication streams, one for its shard group and one for its replicas. The
rules are those of torch's FSDP2 and DDP:

- DDP sends a bucket of gradients once all of them are ready, and waits for all buckets at the end of the backward pass.
- FSDP gathers a unit while the one before it computes. A unit's gradients are reduced while the next one computes; the
  next reduction waits for it. The backward pass ends when all reductions have.
- HSDP sends a unit's reduced gradients to the replicas on their own stream.

On CPUs the reduction of a unit is waited for at once, unless its sum is the final gradient (train/parallel/fsdp).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.config.schema import Compress, Device, StrategyKind, Sync
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED, Collective

# DDP's first bucket (torch/nn/parallel/distributed.py: dist._DEFAULT_FIRST_BUCKET_BYTES)
FIRST_BUCKET_BYTES = 2**20
# equal micro-batches in the middle of a window that are replayed; further ones take as long as the last of them
_REPLAYED = 3


class Mark(StrEnum):
    """Event of a timeline that is no collective.

    Attributes:
        backward: the backward pass starts.
        wait: the parameters of the oldest all-gather in progress are needed.
        end: the micro-batch ends.
        optimizer: the optimizer step has ended.
    """

    backward = "backward"
    wait = "wait"
    end = "end"
    optimizer = "optimizer"


# seconds of computation, the event after it (a collective that starts, or a mark), and the collective's payload bytes
Span = tuple[float, str, int]


@dataclass(frozen=True)
class Timeline:
    """Computation and communication of a window in the order of the program.

    Attributes:
        first: first micro-batch of a window; empty if a window has only one.
        last: micro-batch at the boundary.
        optimizer_s: seconds from the end of the backward pass to the end of the optimizer step.
    """

    first: Sequence[Span]
    last: Sequence[Span]
    optimizer_s: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Timeline:
        """Return the timeline of a recorded window of one or two micro-batches."""
        ends = [place + 1 for place, (_, event, _) in enumerate(spans) if event == Mark.end]
        first, last = (spans[: ends[0]], spans[ends[0] : ends[1]]) if len(ends) > 1 else ((), spans[: ends[0]])
        return cls(first, last, sum(seconds for seconds, _, _ in spans[ends[-1] :]))

    def passes_s(self) -> tuple[float, float]:
        """Return the seconds of computation of the forward and the backward pass of the last micro-batch."""
        place = next(number for number, (_, event, _) in enumerate(self.last) if event == Mark.backward) + 1
        return sum(each[0] for each in self.last[:place]), sum(each[0] for each in self.last[place:])

    def scaled(self, forward: float, backward: float, optimizer: float) -> Timeline:
        """Return this timeline with each part's seconds of computation multiplied."""

        def times(spans: Sequence[Span]) -> list[Span]:
            factor, scaled = forward, list[Span]()
            for seconds, event, payload in spans:
                scaled.append((seconds * factor, event, payload))
                factor = backward if event == Mark.backward else factor
            return scaled

        return Timeline(times(self.first), times(self.last), self.optimizer_s * optimizer)

    def between(self, sync: Sync) -> Sequence[Span]:
        """Return a micro-batch that is neither the first nor the last one of its window. It communicates like the first
        one, except that parameters which stay gathered are not gathered again."""
        if sync is not Sync.gather_once:
            return self.first
        kept: list[Span] = []
        carried = 0.0
        for seconds, event, payload in self.first:
            carried += seconds
            if event not in (Collective.all_gather, Mark.wait):
                kept.append((carried, event, payload))
                carried = 0.0
        return kept


@dataclass(frozen=True, kw_only=True)
class ReplayedWindow:
    """Result of a replay, in seconds.

    Attributes:
        step_s: the whole window with its optimizer step.
        compute_s: forward and backward passes.
        communication_s: collectives by themselves.
    """

    step_s: float
    compute_s: float
    optimizer_s: float
    communication_s: float


_COLLECTIVES = frozenset(kind.value for kind in Collective)


class Streams:
    """Streams of a rank: the time up to which each is busy.

    Args:
        cost: seconds of a collective by itself, from its kind and its payload bytes.
        sharded: all-reduces are those between the replicas of a shard group.
        bucket_bytes: size of DDP's buckets, as they are sent.
        early: a gather starts as soon as the parameters of the one before are in use, because the host is ahead of
            the device; False: it starts when the program gets there.

    Attributes:
        blocking: reductions of sharded gradients are waited for at once.
        now: time of the computation stream.
        computed, communicated: seconds of computation, and of collectives by themselves.
    """

    def __init__(
        self, cost: Callable[[Collective, int], float], *, sharded: bool, bucket_bytes: int, early: bool
    ) -> None:
        self._cost, self._sharded, self._bucket_bytes, self._early = cost, sharded, bucket_bytes, early
        self.blocking = False
        self.now = self.computed = self.communicated = 0.0
        self._shard_free = self._replica_free = self._reduced = 0.0
        self._in_use = 0.0  # time at which the parameters of the latest awaited gather were there
        self._gathers: deque[float] = deque()
        self._bucket, self._limit = 0, 0

    def micro_batch(self, spans: Sequence[Span]) -> None:
        """Replay a micro-batch."""
        self._in_use = self.now
        self._limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        for seconds, event, payload in spans:
            self.now += seconds
            self.computed += seconds
            if event in _COLLECTIVES:
                self._communicate(Collective(event), payload)
            elif event == Mark.wait and self._gathers:
                self.now = self._in_use = max(self.now, self._gathers.popleft())
        self._send_bucket()
        self.now = max(self.now, self._reduced, self._replica_free)

    def repeat(self, spans: Sequence[Span], times: int) -> None:
        """Replay equal micro-batches. After some of them the rest takes as long as the last one that was replayed."""
        before = self.now, self.computed, self.communicated
        for _ in range(min(times, _REPLAYED)):
            before = self.now, self.computed, self.communicated
            self.micro_batch(spans)
        left = max(0, times - _REPLAYED)
        self._shard_free += left * (self.now - before[0])
        self.now += left * (self.now - before[0])
        self.computed += left * (self.computed - before[1])
        self.communicated += left * (self.communicated - before[2])

    def _communicate(self, kind: Collective, payload: int) -> None:
        if kind is Collective.all_reduce and not self._sharded:
            self._bucket += payload
            if self._bucket >= self._limit:
                self._send_bucket()
            return
        seconds = self._seconds(kind, payload)
        if kind is Collective.all_gather:
            self._shard_free = max(self._shard_free, self._in_use if self._early else self.now) + seconds
            self._gathers.append(self._shard_free)
        elif kind is Collective.reduce_scatter:
            self.now = max(self.now, self._reduced)
            self._shard_free = self._reduced = max(self._shard_free, self.now) + seconds
        elif kind is Collective.all_reduce:
            self._replica_free = max(self._replica_free, self._reduced) + seconds
        else:  # statistics, outputs, broadcasts: their results are needed at once
            self.now += seconds
        if self.blocking and kind in (Collective.reduce_scatter, Collective.all_reduce):
            self.now = max(self.now, self._reduced, self._replica_free)

    def _send_bucket(self) -> None:
        if self._bucket:
            seconds = self._seconds(Collective.all_reduce, self._bucket)
            self._replica_free = max(self._replica_free, self.now) + seconds
            self._bucket, self._limit = 0, self._bucket_bytes

    def _seconds(self, kind: Collective, payload: int) -> float:
        seconds = self._cost(kind, payload)
        self.communicated += seconds
        return seconds


def replay(plan: RunPlan, sync: Sync, timeline: Timeline, cost: Callable[[Collective, int], float]) -> ReplayedWindow:
    """Return the time of a full window under a sync policy.

    Args:
        cost: seconds of a collective by itself, from its kind and its payload bytes.
    """
    strategy, count = plan.strategy, plan.batch.accumulation
    on_cpu, sharded = plan.cluster.device is Device.cpu, strategy.kind in SHARDED
    bucket_bytes = round(strategy.bucket_mb * 2**20) // (2 if strategy.compress is Compress.bf16 else 1)
    streams = Streams(cost, sharded=sharded, bucket_bytes=bucket_bytes, early=not on_cpu)
    streams.blocking = on_cpu and sharded
    if count > 1:
        streams.micro_batch(timeline.first)
    if count > 2:
        streams.repeat(timeline.between(sync), count - 2)
    if strategy.kind is StrategyKind.fsdp and sync is not Sync.every:  # the sum of a gradient may wait
        streams.blocking = False
    streams.micro_batch(timeline.last)
    return ReplayedWindow(
        step_s=streams.now + timeline.optimizer_s,
        compute_s=streams.computed,
        optimizer_s=timeline.optimizer_s,
        communication_s=streams.communicated,
    )
