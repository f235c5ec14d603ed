"""Forecast: predicted traffic and memory of a sync policy."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import Sync


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted cost of one sync policy for one rank in a full window.

    Attributes:
        peak_bytes: peak memory of parameters, gradients, optimizer and activations; None if not predicted.
    """

    sync: Sync
    payload_bytes: int
    wire_bytes: int
    peak_bytes: int | None


def predicted_metrics(forecast: Forecast | None, ranks: int) -> dict[str, float]:
    """Return the metrics ``predicted/*`` of a full window, as far as they are known.

    Args:
        forecast: of the plan's sync policy; None if there is none.
        ranks: world size of the job.
    """
    metrics = dict[str, float]()
    if forecast is not None and ranks > 1:
        metrics["predicted/wire_bytes"] = forecast.wire_bytes
    if forecast is not None and forecast.peak_bytes is not None:
        metrics["predicted/peak_bytes"] = forecast.peak_bytes
    return metrics
