"""Forecast of a run: rate, duration, GPU-hours and cost, from the predicted time of a step; also as metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from launcher.plan.forecast import StepTime
from launcher.plan.run_plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """Forecast of a run with the sync policy of its plan. Evaluations and checkpoints are not in it.

    Attributes:
        step: time of a step of a full window.
        samples_per_s, items_per_s: of the whole job; items are what the loss is averaged over, tokens in a language
            model. None if unknown.
        mfu: model FLOPs utilisation; None if unknown.
        total_s, low_s, high_s: all steps, with the interval; None for epochs of a stream. A ramp's shorter windows
            count by their accumulation.
        gpu_hours: of all ranks' devices; None without ``total_s``.
        cost: at ``cluster.price_per_gpu_hour``; None without a price.
    """

    step: StepTime
    samples_per_s: float
    items_per_s: float | None
    mfu: float | None
    total_s: float | None
    low_s: float | None
    high_s: float | None
    gpu_hours: float | None
    cost: float | None

    @classmethod
    def of(cls, plan: RunPlan) -> Self | None:
        """Return the forecast of a plan; None if the time of its step is not predicted."""
        own = (each.step for each in plan.strategy.forecasts if each.sync is plan.strategy.sync)
        step = next(own, None)
        if step is None:
            return None
        steps = _full_steps(plan)
        total = None if steps is None else steps * step.step_s
        hours = None if total is None else total / 3600 * plan.cluster.world_size
        price = plan.cluster.price_per_gpu_hour
        return cls(
            step=step,
            samples_per_s=plan.batch.global_size / step.step_s,
            items_per_s=None if step.items is None else step.items / step.step_s,
            mfu=step.mfu,
            total_s=total,
            low_s=None if steps is None else steps * step.low_s,
            high_s=None if steps is None else steps * step.high_s,
            gpu_hours=hours,
            cost=None if hours is None or price is None else hours * price,
        )


def _full_steps(plan: RunPlan) -> float | None:
    """Return the number of full windows that take as long as all steps; None if the number of steps is unknown."""
    if plan.train.steps is None:
        return None
    full, left, steps = plan.batch.accumulation, plan.train.steps, 0.0
    window = 0
    for stage in plan.batch.ramp:
        count = min(left, stage.windows)
        steps += count * plan.batch.accumulation_at(window) / full
        left -= count
        window += stage.windows
    return steps + left


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
