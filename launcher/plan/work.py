"""Work of a planned job: what the device at hand needs for it, measured on it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.config.schema import Sync
from launcher.plan.run_plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Measured duration.

    Attributes:
        value: seconds.
        error: relative half width of a 90% interval.
    """

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds that parts of a window take on the device at hand while all ranks of a host are at work.

    Attributes:
        forward, backward: one micro-batch of a rank, without collectives.
        optimizer: everything after the last backward pass: unscaling, norm, clipping, the optimizer step, zeroing the
            gradients.
        window: everything else in a window: data, records, and what is done once for each window.
        policies: on one host, a window of ``accumulation`` micro-batches with its collectives, under each sync policy:
            first + second * accumulation. Empty for several hosts.
        silent: on several hosts, the same without collectives, but with the copies into and out of their buffers.
            Empty for one host.
        alone: windows of a single micro-batch, which differ from that line; with collectives as in the other two.
        notes: what the user should know about the measurement, such as other load on this machine.
    """

    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    window: Seconds
    policies: dict[Sync, tuple[Seconds, Seconds]]
    silent: dict[Sync, tuple[Seconds, Seconds]] = field(default_factory=dict[Sync, tuple[Seconds, Seconds]])
    alone: dict[Sync, Seconds] = field(default_factory=dict[Sync, Seconds])
    notes: tuple[str, ...] = ()

    def of_window(self, sync: Sync, accumulation: int) -> Seconds | None:
        """Return the time of a window of ``accumulation`` micro-batches: with collectives on one host, without them on
        several. None if the policy was not measured."""
        if accumulation == 1 and sync in self.alone:
            return self.alone[sync]
        line = (self.policies or self.silent).get(sync)
        if line is None:
            return None
        first, each = line
        value = first.value + each.value * accumulation
        half = first.error * abs(first.value) + each.error * each.value * accumulation
        return Seconds(value=value, error=half / value)


def measure_work(plan: RunPlan, policies: Sequence[Sync]) -> tuple[Work | None, str]:
    """Measure the work of ``plan`` on this machine, or return that of an equal earlier measurement.

    Args:
        policies: sync policies that are measured, of the plan's strategy.

    Returns:
        The work, or None and the reason in a sentence without its full stop.
    """
    if plan.cluster.gpu is not None:
        return None, f"cluster.gpu={plan.cluster.gpu} is not this machine's"
    del policies
    return None, "it is not measured yet"
