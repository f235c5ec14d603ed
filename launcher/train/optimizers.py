"""Optimizers and schedules of a plan: classes found by their path, parameter groups, several optimizers as one."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from launcher.config.schema import Device, OptimizerKind, ScheduleKind
from launcher.errors import ConfigError, EngineMisuse, TaskError, WrongCheckpoint
from launcher.plan.optimizer_plan import TARGET, arguments_of, assign, require_members
from launcher.plan.run_plan import OptimizerPlan, SchedulePlan
from launcher.quantities import first_names
from launcher.targets import find_target, require_arguments

# (optimizer, number of steps or None) -> schedule, used instead of the plan's
MakeSchedule = Callable[[Optimizer, int | None], LRScheduler]


class PlanSchedule(LambdaLR):
    """Learning rates by the plan's factor over ``steps`` optimizer steps; None: their number is not known."""

    def __init__(self, optimizer: Optimizer, plan: SchedulePlan, steps: int | None) -> None:
        super().__init__(optimizer, lambda done: plan.factor(done, steps))

    def continue_at(self, done: int) -> None:
        """Set the rates of the step after ``done`` ones."""
        rates = [base * factor(done) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


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
    formats = schedule.base_lrs
    schedule.load_state_dict(state)
    if isinstance(schedule, PlanSchedule):  # JSON has made numbers of rates that are tensors
        schedule.base_lrs = [
            torch.full_like(own, float(rate)) if isinstance(own, Tensor) else rate
            for own, rate in zip(formats, schedule.base_lrs, strict=True)
        ]


class CombinedOptimizer(Optimizer):
    """Several optimizers that are stepped and scheduled as one. ``members_of`` returns them, to save and restore them.

    ``param_groups`` lists their own groups, in order, so a change to a group affects its optimizer.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        every = set[str].intersection(*(set(optimizer.defaults) for optimizer in self.optimizers))
        super().__init__([{"params": []}], {name: self.optimizers[0].defaults[name] for name in every})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: list[Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        assert not value, "the base class sets an empty list"

    @property
    def state(self) -> dict[Tensor, Any]:
        """Return the state of all parameters. Change a parameter's state in place only."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        assert not value, "the base class sets an empty one"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned: each optimizer takes its groups, and the state of their parameters."""
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = {number for group in own for number in group["params"]}
            state = {number: values for number, values in state_dict["state"].items() if number in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": own})


def as_one(optimizers: Any) -> Optimizer:
    """Return an optimizer, or a list of several, as one.

    Raises:
        EngineMisuse: it is something else, or an optimizer that the engine cannot step.
    """
    members = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for member in members:
        if not isinstance(member, Optimizer):
            raise EngineMisuse(f"The optimizer is a {type(member).__name__}, not a torch optimizer or a list of them.")
        if refusal := _refusal(type(member)):
            raise EngineMisuse(f"{type(member).__name__} {refusal[0]}\n  {refusal[1]}")
    if not members:
        raise EngineMisuse("The list of optimizers is empty.")
    return members[0] if len(members) == 1 else CombinedOptimizer(members)


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that ``optimizer`` combines, or itself: torch saves and restores them one by one."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _refusal(optimizer: Any) -> tuple[str, str] | None:
    """Return why the engine cannot step optimizers of this class, and the remedy; None if it can."""
    if not isinstance(optimizer, type) or not issubclass(optimizer, Optimizer):
        return None  # a function, whose result is looked at
    if issubclass(optimizer, SparseAdam):
        return (
            "takes sparse gradients only, and those of a window are dense.",
            "Use torch.optim.Adam or AdamW; without sparse=True in nn.Embedding.",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is None or closure.default is not closure.empty:
        return None
    return (
        "needs a closure that computes the gradient again, which is not supported.",
        "The gradient of a window is computed once: use an optimizer whose step() needs nothing.",
    )


def _find_class(key: str, target: str) -> Any:
    """Return the class or function ``target``. Raises ConfigError if the engine cannot step its optimizers."""
    function = find_target(f"{key}._target_", target)
    if refusal := _refusal(function):
        raise ConfigError(f"{key}._target_", target, *refusal)
    return function


def trained_parameters(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Return each trained parameter with all of its names: a tied one has several."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[parameter] = (*names.get(parameter, ()), name)
    return [(own, parameter) for parameter, own in names.items()]


def build_optimizer(model: nn.Module, plan: OptimizerPlan, device: Device) -> Optimizer:
    """Return the plan's optimizer of the model's trained parameters.

    The parameters in no group come first, so that the first group's learning rate is optimizer.lr.

    Raises:
        ConfigError: an argument that a class does not have, or a group without parameters.
    """
    named = trained_parameters(model)
    dimensions = [(names, parameter.ndim) for names, parameter in named]
    require_members(dimensions, plan.groups)
    members: dict[int | None, list[tuple[str, nn.Parameter]]] = {None: []}
    for number in range(len(plan.groups)):
        members[number] = []
    for (names, parameter), number in zip(named, assign(dimensions, plan.groups), strict=True):
        members[number].append((names[0], parameter))
    shared: list[dict[str, Any]] = []
    others: list[Optimizer] = []
    for number, taken in members.items():
        parameters = [parameter for _, parameter in taken]
        group = None if number is None else plan.groups[number]
        key = "optimizer" if number is None else f"optimizer.groups[{number}]"
        if not parameters:
            continue
        arguments = arguments_of(plan, group)
        if group is not None and TARGET in group:
            _require_matrices(key, group[TARGET], taken)
            others.append(_construct(key, group[TARGET], [{"params": parameters}], arguments))
        else:
            if plan.target is not None:
                function = _find_class("optimizer", plan.target)
                _require_matrices("optimizer", plan.target, taken)
                arguments = require_arguments(key, plan.target, function, arguments, positional=1)
            shared.append({"params": parameters, **arguments})
    return as_one([*([_main(shared, plan, device)] if shared else []), *others])


def _require_matrices(key: str, target: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for parameters, with their names, that are no matrices, if ``target`` is torch's Muon."""
    others = [(name, parameter.ndim) for name, parameter in parameters if parameter.ndim != 2]
    muon = getattr(torch.optim, "Muon", None)
    if not others or muon is None or find_target(f"{key}._target_", target) is not muon:
        return
    match = "ndim<2" if all(ndim < 2 for _, ndim in others) else "ndim>2"
    if key == "optimizer":
        hint = f'Give them another one: a group {{match: "{match}", _target_: torch.optim.AdamW, lr: 1e-3}}.'
    else:
        hint = f'Put a group that takes them before it in optimizer.groups, such as {{match: "{match}"}}.'
    raise ConfigError(
        f"{key}._target_", target, f"updates matrices only, and these parameters of the group are none: "
        f"{first_names([name for name, _ in others], 8)}.", hint,
    )  # fmt: skip


def _main(groups: list[dict[str, Any]], plan: OptimizerPlan, device: Device) -> Optimizer:
    """Return the optimizer of the groups without an optimizer of their own."""
    if plan.kind is OptimizerKind.custom:
        assert plan.target is not None
        return _construct("optimizer", plan.target, groups, arguments_of(plan))
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    if plan.kind is OptimizerKind.sgd:
        return SGD(groups, plan.lr)
    return AdamW(groups, plan.lr, fused=device is Device.cuda)


def _construct(key: str, target: str, groups: list[dict[str, Any]], arguments: dict[str, Any]) -> Optimizer:
    """Return ``target(groups, **arguments)``. ``key``: of the group of keys that the arguments are from."""
    function = _find_class(key, target)
    fitted = require_arguments(key, target, function, arguments, positional=1)
    try:
        optimizer = function(groups, **fitted)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}._target_", target, f"{type(error).__name__}: {error}.") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{key}._target_", target, f"made a {type(optimizer).__name__}, not a torch optimizer.")
    if refusal := _refusal(type(optimizer)):
        raise ConfigError(f"{key}._target_", target, *refusal)
    return optimizer


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
