"""Forecasts of a plan as lines of its table."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.plan.forecast import StepTime
from launcher.plan.run_forecast import RunForecast
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.quantities import bytes_text, count, duration_text, seconds_text

# names of lines
STEP_TIME, WIRE = "step time", "wire a step"


def forecast_lines(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line, that of the step or of its bytes first; a further line of one subject has no
    name."""
    strategy = plan.strategy
    forecast = RunForecast.of(plan)
    if forecast is not None:
        yield STEP_TIME, _step(forecast.step)
    if strategy.wire_bytes is not None and strategy.wire_bytes_every is not None:
        every = f"{bytes_text(strategy.wire_bytes_every)} with sync=every"
        yield WIRE, f"{bytes_text(strategy.wire_bytes)} a rank predicted; {every}"
    if any(each.peak_bytes is not None or each.wire_s is not None or each.step for each in strategy.forecasts):
        for number, each in enumerate(strategy.forecasts):
            yield "" if number else "policies", _policy(each)
        if strategy.memory_bytes is not None:
            yield "", f"{bytes_text(strategy.memory_bytes)} are available to each rank"
    if forecast is not None:
        yield "parts of a step", _parts(forecast.step)
        yield "throughput", _rates(forecast)
        if forecast.total_s is not None:
            yield "whole run", _run(plan, forecast)


def _policy(forecast: Forecast) -> str:
    step = "" if forecast.step is None else f", {seconds_text(forecast.step.step_s)} a step"
    time_s = "" if forecast.wire_s is None else f" ({forecast.wire_s:,.3g} s of the link)"
    known, reserved = forecast.peak_bytes, forecast.reserved_bytes
    more = "" if reserved is None else f" ({bytes_text(reserved)} reserved)"
    memory = "memory not known" if known is None else f"{bytes_text(known)} of memory at most{more}"
    return f"{forecast.sync.value}: {bytes_text(forecast.wire_bytes)} on the wire a step{time_s}, {memory}{step}"


def _step(step: StepTime) -> str:
    source = {"measured": "measured on this machine", "roofline": "roofline of the GPU's data sheet"}
    corrected = ""
    if step.past_runs:
        corrected = f", corrected by x{step.correction:.2f} from {count(step.past_runs, 'past run')}"
    return (
        f"{seconds_text(step.step_s)} predicted, {seconds_text(step.low_s)} to {seconds_text(step.high_s)} (90%; "
        f"{source.get(step.source, step.source)}{corrected})"
    )


def _parts(step: StepTime) -> str:
    data = f", data {seconds_text(step.data_s)}" if step.data_s else ""
    return (
        f"computing {seconds_text(step.compute_s)}, optimizer {seconds_text(step.optimizer_s)}{data}, exposed "
        f"communication {seconds_text(step.exposed_s)} of {seconds_text(step.communication_s)}"
    )


def _rates(forecast: RunForecast) -> str:
    parts = [f"{_number(forecast.samples_per_s)} samples/s"]
    if forecast.items_per_s is not None and forecast.items_per_s != forecast.samples_per_s:
        parts.append(f"{_number(forecast.items_per_s)} items/s")
    if forecast.mfu is not None:
        parts.append(f"{forecast.mfu:.1%} MFU")
    return ", ".join(parts)


def _run(plan: RunPlan, forecast: RunForecast) -> str:
    total, low, high = (duration_text(each or 0.0) for each in (forecast.total_s, forecast.low_s, forecast.high_s))
    text = f"{count(plan.train.steps or 0, 'step')} in {total} ({low} to {high})"
    if forecast.gpu_hours is not None and plan.cluster.device.value == "cuda":
        text += f", {_number(forecast.gpu_hours)} GPU-hours"
    return text + ("" if forecast.cost is None else f", cost {_number(forecast.cost)}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
