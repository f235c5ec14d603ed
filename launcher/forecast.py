"""Memory and bytes of each sync policy of a sharded job, before it starts: what strategy.sync=auto chooses from."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.errors import TaskError
from launcher.fromjson import build
from launcher.plan import Forecast, RunPlan
from launcher.strategy import with_forecasts, with_memory
from launcher.taskinfo import ask


def weigh_memory(plan: RunPlan, *, choose: bool) -> RunPlan:
    """Return ``plan`` with what the policies send and hold, as windows of the real task have it on tensors without
    memory, in a process of its own: that takes some seconds.

    Where that is not possible, the plan keeps the figures that follow from the number of parameters, or loses only the
    memory, and a note says why.

    Args:
        choose: whether the policy becomes the one that sends the fewest bytes of those that fit.

    Raises:
        TaskError: the job would fail at its first step.
    """
    answer: dict[str, Any] = ask("launcher.train.forecast", plan.to_json()) or {
        "problem": "the process that looked ended early"
    }
    if "error" in answer:
        raise TaskError(f"task._target_={plan.task.target}: {answer['error']}")
    forecasts = [_with_time(build(Forecast, fields), plan) for fields in answer.get("forecasts", ())]
    problem, memory = answer.get("problem"), answer.get("memory_bytes")
    note = ""
    if problem:
        note = f"The memory that each sync policy holds is not known, and was not weighed: {str(problem).rstrip('.')}."
    elif choose and memory is None:
        note = "No GPU is seen here: whether a policy fits one is not known."
    if note:
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    if not forecasts:
        return plan
    if choose and not problem and memory is not None:
        return dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, memory))
    return dataclasses.replace(plan, strategy=with_forecasts(plan.strategy, forecasts))


def _with_time(forecast: Forecast, plan: RunPlan) -> Forecast:
    """Add the seconds of the link, which grow with the bytes that were predicted before."""
    before = next((known for known in plan.strategy.forecasts if known.sync is forecast.sync), forecast)
    if before.wire_s is None or not before.wire_bytes:
        return forecast
    return dataclasses.replace(forecast, wire_s=before.wire_s * forecast.wire_bytes / before.wire_bytes)
