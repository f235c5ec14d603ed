"""Communication meter: counts and times the collectives that really ran, and checks them against the sync policy.

Saved bytes are not computed from the policy, but from what the strategy's collectives have sent. A window that did not
send what its policy requires stops the run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from launcher.config.schema import StrategyKind, Sync
from launcher.errors import SyncPolicyViolated
from launcher.plan.sync_policy import Collective, Layout, transfers_per_window
from launcher.quantities import count


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one window on one rank; bytes."""

    collectives: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class CommStats:
    """Communication of one window on one rank.

    Args:
        kinds: traffic of each kind of collective that ran.
        wire_bytes_every: wire bytes that the window would have needed with every micro-batch synchronised.
        time_s: seconds during which at least one collective was in progress.
    """

    kinds: Mapping[Collective, Traffic]
    wire_bytes_every: int
    time_s: float

    @property
    def collectives(self) -> int:
        return sum(traffic.collectives for traffic in self.kinds.values())

    @property
    def payload_bytes(self) -> int:
        return sum(traffic.payload_bytes for traffic in self.kinds.values())

    @property
    def wire_bytes(self) -> int:
        return sum(traffic.wire_bytes for traffic in self.kinds.values())

    @property
    def saved_fraction(self) -> float:
        return 1 - self.wire_bytes / self.wire_bytes_every if self.wire_bytes_every else 0.0


class Timer:
    """Timer of one collective: the host's clock on CPUs; on GPUs events, which are read after the window."""

    __slots__ = ("_cuda", "began", "ended")

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.began: Any = self._read_clock() if cuda else time.perf_counter()
        self.ended: Any = None

    def _read_clock(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Record the end of the collective. On a GPU, call this where the current stream waits for the collective."""
        self.ended = self._read_clock()

    def span(self, first: Timer, now: float) -> tuple[float, float]:
        """Return start and end in seconds: of the host's clock (the end is ``now`` if the collective is still running),
        or since the start of ``first`` on a GPU."""
        if not self._cuda:
            return self.began, now if self.ended is None else self.ended
        if self.ended is None or not self.ended.query():  # it ran on a stream that the step has not waited for
            return 0.0, 0.0
        return first.began.elapsed_time(self.began) / 1e3, first.began.elapsed_time(self.ended) / 1e3


class Meter:
    """Counter of a window's collectives.

    Args:
        strategy: kind of strategy, which determines the collectives that each policy requires.
        layout: payload of one pass of each kind, padding included.
        device: device of this rank.
        waited_s: seconds of the window in which the host was blocked by other ranks; on a GPU, where the host only
            queues work, those of ``CommStats.time_s``, once the window is closed.
    """

    def __init__(self, strategy: StrategyKind, layout: Layout, device: torch.device) -> None:
        self._strategy, self.layout, self._cuda = strategy, layout, device.type == "cuda"
        self.gathered_by_every: float | None = None  # all-gathered bytes per micro-batch under `every`, once measured
        self.open_window()

    def open_window(self) -> None:
        """Reset all counters, so that an evaluation or calibration since the last window is not counted."""
        self._covered = dict.fromkeys(Collective, 0)
        self._payload = dict.fromkeys(Collective, 0)
        self._collectives = dict.fromkeys(Collective, 0)
        self._gathered_beside = 0
        self._beside = False
        self._timers: list[Timer] = []
        self.waited_s = 0.0
        self._reduces_since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context for an operation that blocks the host until other ranks have done their part."""
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began

    @contextmanager
    def blocking(self, kind: Collective, payload_bytes: int) -> Iterator[None]:
        """Return a context for a collective that blocks the host: it is counted and timed."""
        timer = self.start_timer()
        self.count(kind, payload_bytes)
        with self.waiting():
            yield
        timer.stop()

    def waited_until_now(self, timer: Timer) -> None:
        """Count the time since the start of ``timer`` as waiting, except on a GPU, where the host is not blocked."""
        if not self._cuda:
            self.waited_s += time.perf_counter() - timer.began

    def reduction_started(self) -> None:
        """Record that a backward pass has started a collective, for which it waits at its end."""
        self._reduces_since = time.perf_counter()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Return a context for a backward pass with collectives; time after the start of the last one is waiting."""
        yield
        if self._reduces_since is not None:
            self.waited_s += time.perf_counter() - self._reduces_since
            self._reduces_since = None

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Return a context for passes of a window that are the same under every sync policy: they are counted, but not
        checked against the policy."""
        self._beside = True
        yield
        self._beside = False

    def start_timer(self) -> Timer:
        """Start the timer of a collective; the caller calls ``stop`` at its end."""
        timer = Timer(self._cuda)
        self._timers.append(timer)
        return timer

    def count(self, kind: Collective, payload_bytes: int, covers: int | None = None, collectives: int = 1) -> None:
        """Count a collective.

        Args:
            payload_bytes: bytes that this rank passes to it.
            covers: bytes of parameters or gradients that it synchronises, if that is not ``payload_bytes``
                (compression).
            collectives: number of collectives, if the call stands for several.
        """
        if not self._beside:
            self._covered[kind] += payload_bytes if covers is None else covers
        elif kind is Collective.all_gather:
            self._gathered_beside += payload_bytes
        self._payload[kind] += payload_bytes
        self._collectives[kind] += collectives

    @property
    def payload(self) -> Mapping[Collective, int]:
        """Payload bytes of each kind since the window was opened."""
        return dict(self._payload)

    @property
    def silent(self) -> bool:
        """True if no collective has run since the window was opened."""
        return not any(self._collectives.values())

    def close_window(self, micro_batches: int, sync: Sync) -> CommStats:
        """Return what this window sent. The device must have completed it."""
        _, every_gathers, times, factors = _expected(self.layout, self._strategy, sync, micro_batches)
        payload = self._payload
        if sync is Sync.every:
            gathered = payload[Collective.all_gather] - self._gathered_beside
            self.gathered_by_every = gathered / micro_batches
        kinds: dict[Collective, Traffic] = {}
        for kind, number in self._collectives.items():
            if number:
                kinds[kind] = Traffic(number, payload[kind], round(payload[kind] * factors[kind]))
        # had it been `every`: each reduction once per micro-batch; gathers as measured when `every` ran, or by the
        # policy table if it has not
        wire = 0.0
        for kind, sent in payload.items():
            if kind is Collective.all_gather:
                gathered = every_gathers
                if self.gathered_by_every is not None:
                    gathered = round(self.gathered_by_every * micro_batches)
                sent = gathered + self._gathered_beside
            else:
                sent *= times.get(kind, 1)
            wire += sent * factors[kind]
        time_s = _union_s(self._timers)
        if self._cuda:
            self.waited_s = time_s
        return CommStats(kinds, round(wire), time_s)

    def check(self, micro_batches: int, sync: Sync) -> None:
        """Raise SyncPolicyViolated if this window sent other than what ``sync`` requires for ``micro_batches``."""
        expected, *_ = _expected(self.layout, self._strategy, sync, micro_batches)
        for kind, wanted in expected.items():
            seen = self._covered[kind]
            if kind is Collective.all_gather and sync is not Sync.gather_once:
                # how often a unit is gathered depends on how often the model calls it
                wrong = seen < wanted // (2 * micro_batches)
            else:
                wrong = seen != wanted
            if wrong:
                raise SyncPolicyViolated(
                    f"strategy.sync={sync.value} means {kind.value} of {wanted:,} bytes in this window of "
                    f"{count(micro_batches, 'micro-batch', 'micro-batches')}; {seen:,} bytes were "
                    f"seen in {count(self._collectives[kind], 'collective')}.\n"
                    "  The loss must reach every parameter that requires a gradient, by passes of the engine's model "
                    "(engine.model, or the model handed to loss), not of a copy."
                )


@functools.cache
def _expected(
    layout: Layout, strategy: StrategyKind, sync: Sync, micro_batches: int
) -> tuple[Mapping[Collective, int], int, Mapping[Collective, int], Mapping[Collective, float]]:
    """Return the payload that the policy requires of a window; the gathers of `every`; how many times as often it
    reduces; and wire bytes per payload byte."""
    ran, every = (transfers_per_window(strategy, policy, micro_batches) for policy in (sync, Sync.every))
    times = {
        Collective.all_reduce: every.all_reduce // ran.all_reduce if ran.all_reduce else 1,
        Collective.reduce_scatter: every.reduce_scatter // ran.reduce_scatter if ran.reduce_scatter else 1,
    }
    gathers = layout.payload(every)[Collective.all_gather]
    return layout.payload(ran), gathers, times, {kind: layout.wire_factor(kind) for kind in Collective}


def _union_s(timers: list[Timer]) -> float:
    """Return the seconds during which at least one of ``timers`` was in progress."""
    if not timers:
        return 0.0
    now, first = time.perf_counter(), timers[0]
    if len(timers) == 1:
        began_s, ended_s = first.span(first, now)
        return ended_s - began_s
    spans = [timer.span(first, now) for timer in timers]
    total, end = 0.0, float("-inf")
    for began_s, ended_s in sorted(spans):
        total += max(0.0, ended_s - max(began_s, end))
        end = max(end, ended_s)
    return total
