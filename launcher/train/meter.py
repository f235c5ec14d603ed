"""Counts the collectives that really ran, checks them against the sync policy, and times the counterfactual.

The claim "n bytes were saved" is never computed from the policy: it is what the communication hook saw, and a window
whose bytes are not those of its policy stops the run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from launcher.config import Sync
from launcher.errors import PolicyNotObserved
from launcher.plan import wire_factor

# DDP lays its buckets out anew after the first synchronised backward pass: neither it nor its successor is typical
WARM_UP_WINDOWS = 2


@dataclass(frozen=True)
class CommStats:
    """Gradient collectives of one window on one rank. Bytes; ``*_every``: had each micro-batch been synchronised."""

    collectives: int
    payload_bytes: int
    wire_bytes: int
    wire_bytes_every: int

    @property
    def saved_fraction(self) -> float:
        return 1 - self.wire_bytes / self.wire_bytes_every if self.wire_bytes_every else 0.0


class Meter:
    """Counts per window.

    Args:
        gradient_bytes: one synchronisation's payload: all gradients of this rank.
        world_size: 1 means that nothing is ever sent.
    """

    def __init__(self, gradient_bytes: int, world_size: int) -> None:
        self._gradient_bytes = gradient_bytes if world_size > 1 else 0
        self._factor = wire_factor(world_size)
        self._collectives = 0
        self._payload = 0

    def count(self, payload_bytes: int) -> None:
        """Called by the communication hook, once a collective."""
        self._collectives += 1
        self._payload += payload_bytes

    def close_window(self, micro_batches: int, sync: Sync) -> CommStats:
        """What this window sent; the counters start again.

        Raises:
            PolicyNotObserved: it is not what ``sync`` means for a window of ``micro_batches``.
        """
        collectives, payload = self._collectives, self._payload
        self._collectives = self._payload = 0
        synced = micro_batches if sync is Sync.every else 1
        expected = synced * self._gradient_bytes
        if payload != expected:
            raise PolicyNotObserved(
                f"strategy.sync={sync.value} means {expected:,} bytes of gradients in this window of {micro_batches} "
                f"micro-batches; the communication hook saw {payload:,} in {collectives} collectives.\n"
                "  Every forward pass must go through the engine's model (engine.model, or the model handed to loss), "
                "once a micro-batch, and the loss must reach every parameter that requires a gradient."
            )
        return CommStats(
            collectives=collectives,
            payload_bytes=payload,
            wire_bytes=round(payload * self._factor),
            wire_bytes_every=round(micro_batches * self._gradient_bytes * self._factor),
        )


@dataclass(frozen=True)
class Calibrated:
    """Medians over the calibration's windows, in seconds."""

    step_s_every: float
    step_s: float

    @property
    def speedup(self) -> float:
        return self.step_s_every / self.step_s


@dataclass
class Calibration:
    """Runs some early full windows with sync=every, in turn with the job's own policy, and compares their step times.

    The two policies sum the same gradients, so a calibration window trains like any other: nothing is run twice, no
    sample moves, and gradients differ by rounding only.

    ``windows``: how many of each; 0 to leave it out.
    """

    own: Sync
    windows: int
    start: int = WARM_UP_WINDOWS
    _every_s: list[float] = field(default_factory=list[float])
    _own_s: list[float] = field(default_factory=list[float])

    @property
    def _stop(self) -> int:
        return self.start + 2 * self.windows

    def sync(self, step: int) -> Sync:
        """The policy of the window at ``step``, counted from the start of this process."""
        in_turn = self.start <= step < self._stop and (step - self.start) % 2 == 0
        return Sync.every if in_turn else self.own

    def observe(self, step: int, sync: Sync, step_s: float, full: bool) -> Calibrated | None:
        """Take a window's time in; the result, once, after the last of them."""
        if not self.start <= step < self._stop:
            return None
        if full:  # a short window is faster for another reason
            (self._every_s if sync is not self.own else self._own_s).append(step_s)
        return self.result() if step == self._stop - 1 else None

    def result(self) -> Calibrated | None:
        if not self._every_s or not self._own_s:
            return None
        return Calibrated(statistics.median(self._every_s), statistics.median(self._own_s))
