"""Optimizers of a plan: classes found by their path, parameter groups, several optimizers as one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

from launcher.config.schema import Device, OptimizerKind
from launcher.errors import ConfigError, EngineMisuse
from launcher.plan.optimizer_plan import TARGET, arguments_of, assign, require_members
from launcher.plan.run_plan import OptimizerPlan
from launcher.quantities import first_names
from launcher.targets import find_target, require_arguments


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


def set_mode(optimizer: Optimizer, *, training: bool) -> None:
    """Call ``train()`` or ``eval()`` of optimizers that have both: between steps, schedule-free ones exchange the
    parameters' values for training and for evaluation."""
    for member in _with_modes(optimizer):
        member.train() if training else member.eval()


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has values for training and others for evaluation, see ``set_mode``."""
    return bool(_with_modes(optimizer))


def _with_modes(optimizer: Optimizer) -> list[Any]:
    return [member for member in members_of(optimizer)
            if all(callable(getattr(member, name, None)) for name in ("train", "eval"))]  # fmt: skip


@contextmanager
def evaluation_values(optimizer: Optimizer) -> Iterator[None]:
    """Context manager in which parameters have the values for evaluation, see ``set_mode``. Their bits are restored."""
    members = _with_modes(optimizer)
    parameters = [p.detach() for member in members for group in member.param_groups for p in group["params"]]
    kept = [parameter.clone() for parameter in parameters]
    set_mode(optimizer, training=False)
    yield
    set_mode(optimizer, training=True)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)


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
        # torch has no fused kernel of SGD for shards and complex numbers; None: its own choice
        from torch.distributed.tensor import DTensor  # a look at a task does not wait for its import

        fuses = all(p.is_floating_point() and not isinstance(p, DTensor) for group in groups for p in group["params"])
        return SGD(groups, plan.lr, fused=(device is Device.cuda and fuses) or None)
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
