"""Forecasts as lines of the plan's table."""

from __future__ import annotations

import dataclasses

from launcher.report.tables import forecast_lines
from tests.helpers import make_plan


def test_memory_is_that_of_each_policy_or_at_least_what_a_rank_holds() -> None:
    plan = make_plan("strategy.sync=boundary", "batch.accumulation=4", "precision=fp32")
    lines = dict(forecast_lines(plan))
    assert lines["wire a step"] == "4.00 kB a rank predicted; 16.00 kB with sync=every"
    assert lines["memory"].startswith("A rank needs at least 16.00 kB for parameters, gradients")
    forecasts = tuple(dataclasses.replace(each, peak_bytes=10**6) for each in plan.strategy.forecasts)
    plan = dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=10**9)
    )
    assert [text for _, text in forecast_lines(plan)][1:] == [
        "every: 16.00 kB on the wire a step, 1.00 MB of memory at most",
        "boundary: 4.00 kB on the wire a step, 1.00 MB of memory at most",
        "1.00 GB are available to each rank",
    ]


def test_one_rank_has_no_line_on_bytes_that_it_does_not_send() -> None:
    plan = make_plan("cluster.workers_per_node=1", "batch.accumulation=4", "precision=fp32")
    assert {each.wire_bytes for each in plan.strategy.forecasts} == {0}
    assert "wire a step" not in dict(forecast_lines(plan))
