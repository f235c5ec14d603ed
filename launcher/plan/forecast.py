"""Forecast: predicted traffic, memory and time of a sync policy."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import Sync
from launcher.plan.step_time import StepTime

# fields of StrategyPlan that say why a strategy and a policy were chosen, or what they are expected to need, and do
# not affect what a step does
PREDICTIONS = (
    "kind_reason", "sync_reason", "rehearses", "forecasts", "memory_bytes", "payload_bytes", "payload_bytes_every",
    "wire_bytes", "wire_bytes_every",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted cost of one sync policy for one rank in a full window.

    Attributes:
        wire_s: seconds that the link needs for the wire bytes; None if its rate is unknown.
        peak_bytes: peak memory of parameters, gradients, optimizer and activations; None if not predicted.
        reserved_bytes: what torch's allocator reserves for them on a GPU; None if not predicted, and on CPUs.
        step: time of a step; None if not predicted.
    """

    sync: Sync
    payload_bytes: int
    wire_bytes: int
    wire_s: float | None
    peak_bytes: int | None
    reserved_bytes: int | None = None
    step: StepTime | None = None
