"""Memory and bytes of each sync policy of a sharded job, before it starts: what strategy.sync=auto chooses from."""

from __future__ import annotations

import dataclasses

from launcher.errors import TaskError
from launcher.fromjson import build
from launcher.plan import Forecast, RunPlan
from launcher.strategy import with_forecasts, with_memory
from launcher.taskinfo import ask


def weigh_memory(plan: RunPlan) -> RunPlan:
    """``plan`` with the policy that sends the fewest bytes of those that fit, and the forecasts it was chosen from.

    The task's model goes through a window of each policy on tensors without memory, in a process of its own: that takes
    some seconds. Where it cannot be done, the plan keeps the policy with the fewest bytes, and a note says why.

    Raises:
        TaskError: the job would fail at its first step.
    """
    answer = ask("launcher.train.forecast", plan.to_json())
    if answer is not None and "error" in answer:
        raise TaskError(f"task._target_={plan.task.target}: {answer['error']}")
    problem = "the process that looked ended early" if answer is None else answer.get("problem")
    if answer is None or problem:
        note = f"What each sync policy holds is not known, and was not weighed: {str(problem).rstrip('.')}."
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    wire_s = {forecast.sync: forecast.wire_s for forecast in plan.strategy.forecasts}
    found: list[Forecast] = [build(Forecast, fields) for fields in answer["forecasts"]]
    forecasts = [dataclasses.replace(forecast, wire_s=wire_s[forecast.sync]) for forecast in found]
    if answer["memory_bytes"] is None:
        note = "No GPU is seen here: whether a policy fits one is not known."
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
        return dataclasses.replace(plan, strategy=with_forecasts(plan.strategy, forecasts))
    return dataclasses.replace(plan, strategy=with_memory(plan.strategy, forecasts, answer["memory_bytes"]))
