"""Forecasts of a plan as lines of its table."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.schema import Sync
from launcher.plan.memory_limit import least_note
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.quantities import bytes_text

WIRE = "wire a step"  # name of a line


def forecast_lines(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line, the bytes of a step first; a further line of one subject has no name."""
    strategy = plan.strategy
    own, every = strategy.forecast, strategy.forecast_of(Sync.every)
    if own and every and every.wire_bytes:  # one rank sends nothing
        yield WIRE, f"{bytes_text(own.wire_bytes)} a rank predicted; {bytes_text(every.wire_bytes)} with sync=every"
    if any(each.peak_bytes is not None for each in strategy.forecasts):
        for number, each in enumerate(strategy.forecasts):
            yield "" if number else "policies", _policy(each)
        if strategy.memory_bytes is not None:
            yield "", f"{bytes_text(strategy.memory_bytes)} are available to each rank"
    elif (least := least_note(plan, None)) and not any(least in note for note in plan.notes):
        yield "memory", least


def _policy(forecast: Forecast) -> str:
    known = forecast.peak_bytes
    memory = "memory not known" if known is None else f"{bytes_text(known)} of memory at most"
    return f"{forecast.sync.value}: {bytes_text(forecast.wire_bytes)} on the wire a step, {memory}"
