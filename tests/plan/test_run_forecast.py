"""Predictions that a run records, and plans that have none any more."""

from __future__ import annotations

import dataclasses

from launcher.config.schema import PrecisionKind
from launcher.plan.forecast import StepTime
from launcher.plan.run_forecast import predicted_metrics
from launcher.plan.run_plan import RunPlan
from tests.helpers import make_plan

STEP = StepTime(
    step_s=1.0, low_s=0.8, high_s=1.25, compute_s=0.7, optimizer_s=0.1, data_s=0.0, communication_s=0.4, exposed_s=0.2,
    source="measured",
)  # fmt: skip


def predicted(*overrides: str) -> RunPlan:
    """A plan whose policies have different predictions."""
    plan = make_plan("batch.global_size=64", "batch.micro_size=2", *overrides)
    forecasts = tuple(
        dataclasses.replace(each, peak_bytes=1000 + place, step=dataclasses.replace(STEP, step_s=1.0 + place / 10))
        for place, each in enumerate(plan.strategy.forecasts)
    )
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts))


def test_the_metrics_are_those_of_the_plans_policy() -> None:
    assert predicted_metrics(predicted("strategy.sync=boundary")) == {
        "predicted/wire_bytes": 4000, "predicted/peak_bytes": 1001, "predicted/step_s": 1.1,
        "predicted/step_low_s": 0.8, "predicted/step_high_s": 1.25, "predicted/exposed_s": 0.2,
    }  # fmt: skip
    every = predicted_metrics(predicted("strategy.sync=every"))
    assert (every["predicted/wire_bytes"], every["predicted/step_s"]) == (16 * 4000, 1.0)


def test_what_is_unknown_is_left_out() -> None:
    assert predicted_metrics(make_plan("strategy.sync=boundary", "batch.accumulation=1")) == {
        "predicted/wire_bytes": 4000
    }
    assert predicted_metrics(make_plan("strategy=single", "cluster.workers_per_node=1")) == {}
    assert predicted_metrics(make_plan("strategy.compress=powersgd")) == {}


def test_smaller_micro_batches_have_no_prediction() -> None:
    plan = predicted()
    smaller = plan.batch.shrunk()
    assert smaller is not None
    assert predicted_metrics(plan.with_micro_batches(smaller)) == {}


def test_a_precision_decided_at_the_start_has_a_prediction_if_it_is_the_one_that_was_assumed() -> None:
    auto = predicted()
    assert auto.precision.kind is PrecisionKind.auto
    assert predicted_metrics(auto.with_precision(PrecisionKind.fp32, "")) == predicted_metrics(auto)
    assert predicted_metrics(auto.with_precision(PrecisionKind.bf16, "")) == {}
    bf16 = predicted("precision=bf16")
    assert predicted_metrics(bf16.with_precision(PrecisionKind.bf16, "")) == predicted_metrics(bf16)
