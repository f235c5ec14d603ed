"""Prediction of a plan, as metrics of its run."""

from __future__ import annotations

from launcher.plan.run_plan import RunPlan


def predicted_metrics(plan: RunPlan) -> dict[str, float]:
    """Return the metrics ``predicted/*`` of a full window under the plan's sync policy, as far as they are known."""
    forecast, metrics = plan.strategy.forecast, dict[str, float]()
    if forecast is None:
        return metrics
    if plan.batch.world_size > 1:
        metrics["predicted/wire_bytes"] = forecast.wire_bytes
    if forecast.peak_bytes is not None:
        metrics["predicted/peak_bytes"] = forecast.peak_bytes
    if (step := forecast.step) is not None:
        metrics["predicted/step_s"] = step.step_s
        metrics["predicted/step_low_s"], metrics["predicted/step_high_s"] = step.low_s, step.high_s
        metrics["predicted/exposed_s"] = step.exposed_s
    return metrics
