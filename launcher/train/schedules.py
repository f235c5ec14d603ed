"""Learning rate schedules: those of the plan and of other classes, their state in a checkpoint."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from launcher.config.schema import ScheduleKind
from launcher.errors import ConfigError, TaskError, WrongCheckpoint
from launcher.plan.run_plan import SchedulePlan
from launcher.targets import find_target, require_arguments
from launcher.train.optimizers import members_of

# (optimizer, number of steps or None) -> schedule, used instead of the plan's
MakeSchedule = Callable[[Optimizer, int | None], LRScheduler]


class PlanSchedule(LambdaLR):
    """Learning rates by the plan's factor over ``steps`` optimizer steps; None: their number is not known."""

    def __init__(self, optimizer: Optimizer, plan: SchedulePlan, steps: int | None) -> None:
        super().__init__(optimizer, plan.factors(steps))

    def continue_at(self, done: int) -> None:
        """Set the rates of the step after ``done`` ones."""
        rates = [base * factor(done) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def base_rates(schedule: LRScheduler) -> list[float | Tensor]:
    """Return the rate of each group that a schedule multiplies; none for one made of others, such as SequentialLR."""
    return getattr(schedule, "base_lrs", [])


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """Return the state as JSON values. That of other classes than PlanSchedule is serialized by torch.save and base64,
    because JSON would change types such as Counter.

    Raises:
        TaskError: it holds objects that are not loaded from a checkpoint again.
    """
    if isinstance(schedule, PlanSchedule):
        rates = {name: [float(rate) for rate in getattr(schedule, name)] for name in ("base_lrs", "_last_lr")}
        return schedule.state_dict() | rates  # rates may be tensors
    file = io.BytesIO()
    try:
        torch.save(schedule.state_dict(), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TaskError(
            f"The state of the learning rate schedule ({type(schedule).__name__}) cannot be saved: {error}.\n"
            "  Keep numbers, texts, lists and dicts of them in it only."
        ) from error
    return {"class": type(schedule).__name__, "torch": base64.b64encode(file.getvalue()).decode()}


def restore_schedule(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Restore what ``schedule_state`` returned.

    Raises:
        WrongCheckpoint: that was the state of another class.
    """
    saved = state.get("class", PlanSchedule.__name__)
    if saved != type(schedule).__name__:
        raise WrongCheckpoint(
            f"The checkpoint has the state of the learning rate schedule {saved}, and the run now has a "
            f"{type(schedule).__name__}.\n  Use the same schedule, or start a new run."
        )
    if "torch" in state:
        state = torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)
    formats = base_rates(schedule)
    schedule.load_state_dict(state)
    if isinstance(schedule, PlanSchedule):  # JSON has made numbers of rates that are tensors
        schedule.base_lrs = [
            torch.full_like(own, float(rate)) if isinstance(own, Tensor) else rate
            for own, rate in zip(formats, schedule.base_lrs, strict=True)
        ]


def build_schedule(optimizer: Optimizer, plan: SchedulePlan, steps: int | None) -> LRScheduler:
    """Return the plan's learning rate schedule over ``steps`` optimizer steps; None: their number is not known."""
    if plan.kind is not ScheduleKind.custom:
        return PlanSchedule(optimizer, plan, steps)
    assert plan.target is not None
    function = find_target("schedule._target_", plan.target)
    fitted = require_arguments("schedule", plan.target, function, plan.arguments, positional=1)
    try:
        return require_schedule(function(optimizer, **fitted), f"schedule._target_={plan.target}")
    except (TypeError, ValueError) as error:
        raise ConfigError("schedule._target_", plan.target, f"{type(error).__name__}: {error}.") from error


def require_length(schedule: LRScheduler, steps: int | None) -> None:
    """Raise ConfigError if ``schedule`` ends before ``steps`` optimizer steps; OneCycleLR would raise in mid-run.

    Args:
        steps: None if the length of the run is not known.
    """
    total = getattr(schedule, "total_steps", None)
    if isinstance(total, int) and steps is not None and total < steps:
        raise ConfigError(
            "schedule.total_steps", total, f"{type(schedule).__name__} ends before the run's {steps} steps.",
            "Use schedule.total_steps=${train.steps}. A run that is resumed keeps the schedule that it started with.",
        )  # fmt: skip


def require_schedule(schedule: Any, source: str, optimizer: Optimizer | None = None) -> LRScheduler:
    """Return ``schedule`` if the engine can step it.

    Args:
        optimizer: the one whose rates it must set. None: not checked.

    Raises:
        TaskError: it is no learning rate schedule, needs a metric at each step, or is that of another optimizer.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        raise TaskError(
            f"{source}: ReduceLROnPlateau needs a metric at each step, which a step does not have.\n"
            "  Use a schedule that depends on the number of steps only."
        )
    if not isinstance(schedule, LRScheduler):
        raise TaskError(
            f"{source}: made a {type(schedule).__name__}, not a torch.optim.lr_scheduler.LRScheduler.\n"
            "  Return one, such as LambdaLR(optimizer, factor)."
        )
    own = None if optimizer is None else [optimizer, *members_of(optimizer)]
    if own is not None and not any(schedule.optimizer is each for each in own):
        raise TaskError(
            f"{source}: made a {type(schedule).__name__} of another optimizer.\n"
            "  Pass the schedule the optimizer that the method is called with."
        )
    return schedule
