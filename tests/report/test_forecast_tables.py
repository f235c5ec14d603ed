"""Forecasts as lines of the plan's table."""

from __future__ import annotations

import dataclasses

from launcher.plan.forecast import StepTime
from launcher.plan.past_runs import corrected_step
from launcher.plan.run_plan import RunPlan
from launcher.report.forecast_tables import forecast_lines
from tests.helpers import make_plan

STEP = StepTime(
    step_s=1.0, low_s=0.8, high_s=1.25, compute_s=0.7, optimizer_s=0.1, data_s=0.0, communication_s=0.4, exposed_s=0.2,
    source="measured",
)  # fmt: skip


def step_line(step: StepTime) -> str:
    plan: RunPlan = make_plan("strategy.sync=boundary")
    forecasts = tuple(dataclasses.replace(each, step=step) for each in plan.strategy.forecasts)
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts))
    return next(text for name, text in forecast_lines(plan) if name == "step time")


def test_the_plan_says_that_past_runs_have_corrected_a_step() -> None:
    assert step_line(STEP) == "1 s predicted, 800 ms to 1.25 s (90%; measured on this machine)"
    line = step_line(corrected_step(STEP, [(1.0, 1.1)] * 4))
    assert line.startswith("1.079 s predicted")
    assert line.endswith("(90%; measured on this machine, corrected by x1.08 from 4 past runs)")
