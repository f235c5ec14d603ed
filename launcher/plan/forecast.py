"""Forecast: predicted traffic, memory and time of a sync policy."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import Sync

# fields of StrategyPlan that say why a strategy and a policy were chosen, or what they are expected to need, and do
# not affect what a step does
PREDICTIONS = (
    "kind_reason", "sync_reason", "rehearses", "forecasts", "memory_bytes", "payload_bytes", "payload_bytes_every",
    "wire_bytes", "wire_bytes_every",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of one optimizer step of a full window, in seconds.

    Attributes:
        step_s: the whole step; its 90% interval is from ``low_s`` to ``high_s``.
        compute_s: forward and backward passes of the window.
        optimizer_s: everything after the last backward pass: clipping, the optimizer step, zeroing the gradients.
        data_s: data, records and small collectives of a window, as far as they do not overlap.
        communication_s: the collectives of the window by themselves.
        exposed_s: the part of them that computation does not hide.
        source: "measured" (on this machine's device) or "roofline" (from the table of GPUs).
        correction: factor from past runs that all times contain already.
        past_runs: number of these runs.
        items: items of the loss in the window, on all ranks; None if unknown.
        flops: model FLOPs of the window, forward and backward, on all ranks; None if unknown.
        peak_flops: FLOP/s of all ranks' devices in the job's precision; None if unknown.
        busy: whether other processes used this machine during the measurement.
    """

    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    optimizer_s: float
    data_s: float
    communication_s: float
    exposed_s: float
    source: str
    correction: float = 1.0
    past_runs: int = 0
    items: float | None = None
    flops: float | None = None
    peak_flops: float | None = None
    busy: bool = False

    @property
    def mfu(self) -> float | None:
        """Return the utilisation of the devices by the model."""
        return None if self.flops is None or self.peak_flops is None else self.flops / self.step_s / self.peak_flops


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
