"""Optimizer of a plan: its arguments after learning rate scaling, and its parameter groups. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launcher.config.key_facts import is_number, valid_betas
from launcher.config.schema import LrScaling, OptimizerConfig, OptimizerKind, ScheduleKind
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.run_plan import OptimizerPlan, solved_part
from launcher.quantities import first_names

_DIMENSIONS = re.compile(r"\s*ndim\s*(<=|>=|==|<|>)\s*(\d+)\s*")
# common practice: decay applies to matrices, not to biases and the scales of norms
DEFAULT_GROUP: Mapping[str, Any] = {"match": "ndim<2", "weight_decay": 0.0}
_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
# arguments of each kind; a custom class has its own
_ARGUMENTS = {
    OptimizerKind.adamw: ("lr", "weight_decay", "betas", "eps"),
    OptimizerKind.sgd: ("lr", "weight_decay", "momentum", "nesterov"),
}
_NAMED = ("weight_decay", "betas", "eps", "momentum", "nesterov")
# a parameter's names, of which a tied one has several, and its number of dimensions
Named = tuple[tuple[str, ...], int]
# keys of a group of the plan that are no arguments
MATCH, TARGET = "match", "_target_"


def solve_optimizer(config: OptimizerConfig, global_size: int) -> OptimizerPlan:
    """Return the plan of the optimizer for windows of ``global_size`` samples.

    Raises:
        ConfigError: arguments that the optimizer does not have, or that contradict each other.
    """
    require_target("optimizer", config.kind, config.target, "torch.optim.Adagrad")
    if config.lr_scaling is not LrScaling.none and config.reference_batch is None:
        raise ConfigError(
            "optimizer.lr_scaling", config.lr_scaling, "needs the global batch that lr was tuned for.",
            "Set optimizer.reference_batch (samples).",
        )  # fmt: skip
    plan = solved_part(OptimizerPlan, config, base_lr=config.lr, groups=parameter_groups(config))
    if config.kind is OptimizerKind.custom:  # the class has defaults of its own
        named = {name: value for name in _NAMED if (value := getattr(config, name)) is not None}
        plan = dataclasses.replace(plan, arguments={**config.arguments, **named})
    plan = dataclasses.replace(plan, base_betas=plan.betas, base_eps=plan.eps)
    kappa = global_size / (config.reference_batch or global_size)
    if config.lr_scaling is LrScaling.none:
        return plan
    if config.lr_scaling is LrScaling.linear:
        return _scaled(plan, kappa)
    betas, root = _scaled_betas(plan, kappa), math.sqrt(kappa)
    return dataclasses.replace(_scaled(plan, root), betas=betas, eps=plan.eps / root)


def require_target(group: str, kind: OptimizerKind | ScheduleKind, target: str | None, example: str) -> None:
    """Raise ConfigError unless ``group``._target_ is set if, and only if, the option ``custom`` was chosen."""
    custom = kind.value == "custom"
    if custom and target is None:
        raise ConfigError(
            f"{group}._target_", "null", f"{group}=custom needs the class of your {group}.",
            f"Name it by its dotted path, such as {group}._target_={example}.",
        )  # fmt: skip
    if not custom and target is not None:
        raise ConfigError(
            f"{group}._target_", target, f"has no effect with {group}={kind.value}.",
            f"Choose {group}=custom; in a file of your own: `- override /{group}: custom` among its defaults.",
        )  # fmt: skip


def parameter_groups(config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the configured parameter groups, or the default ones if none are configured.

    Raises:
        ConfigError: a group has no valid ``match``, or an argument that its optimizer does not have.
    """
    if config.groups is None:
        # the same for every weight_decay, which may change on resume, while the groups may not
        return [] if config.kind is OptimizerKind.custom and config.weight_decay is None else [dict(DEFAULT_GROUP)]
    for number, group in enumerate(config.groups):
        key = f"optimizer.groups[{number}]"
        _require_match(key, group)
        if TARGET not in group:
            _require_group_arguments(key, group, config.kind)
        elif not isinstance(group[TARGET], str):
            raise ConfigError(f"{key}.{TARGET}", group[TARGET], "must be the dotted path of a class.")
        elif "lr" not in group:
            raise ConfigError(f"{key}.lr", "null", "must be a number: a group with _target_ has a rate of its own.")
        if not is_number(group.get("lr", 1.0)) or not group.get("lr", 1.0) > 0:
            raise ConfigError(f"{key}.lr", group["lr"], "must be a number above 0.")
        if not is_number(group.get("weight_decay", 0.0)) or not group.get("weight_decay", 0.0) >= 0:
            raise ConfigError(f"{key}.weight_decay", group["weight_decay"], "must be a number of at least 0.")
    return [dict(group) for group in config.groups]


def _require_match(key: str, group: Mapping[str, Any]) -> None:
    match = group.get(MATCH)
    if not isinstance(match, str) or not match:
        raise ConfigError(
            key, dict(group), "has no key match.",
            'Give a regular expression for names, or a number of dimensions: {match: "ndim<2", weight_decay: 0}.',
        )  # fmt: skip
    try:
        _matcher(match)
    except re.error as error:
        raise ConfigError(
            f"{key}.match", match, f"is neither a regular expression nor a number of dimensions: {error}."
        ) from None


def _require_group_arguments(key: str, group: Mapping[str, Any], kind: OptimizerKind) -> None:
    """Raise ConfigError for an argument that a built-in optimizer does not have; a class checks its own."""
    if kind not in _ARGUMENTS:
        return
    names = _ARGUMENTS[kind]
    for name in group:
        if name not in (MATCH, *names):
            raise ConfigError(
                f"{key}.{name}", group[name], f"{kind.value} has no such argument.",
                did_you_mean(name, names).strip() or f"Its arguments: {', '.join(names)}.",
            )  # fmt: skip
    if "betas" in group and not valid_betas(group["betas"]):
        raise ConfigError(f"{key}.betas", group["betas"], "must be two numbers of at least 0 and below 1.")


def _matcher(match: str) -> Callable[[str, int], bool]:
    """Return the function of a parameter's name and number of dimensions that ``match`` stands for."""
    if re.match(r"\s*ndim\s*=[^=]", match):
        raise re.error("a number of dimensions is written ndim==2 or ndim<2")
    if found := _DIMENSIONS.fullmatch(match):
        compare, number = _COMPARISONS[found[1]], int(found[2])
        return lambda _, ndim: compare(ndim, number)
    pattern = re.compile(match)
    return lambda name, _: pattern.search(name) is not None


def assign(parameters: Iterable[Named], groups: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return the index of each parameter's group, the first that matches; None for the others."""
    matchers = [_matcher(group[MATCH]) for group in groups]
    return [
        next((i for i, matches in enumerate(matchers) if any(matches(name, ndim) for name in names)), None)
        for names, ndim in parameters
    ]


def require_members(parameters: Sequence[Named], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a group that takes no parameter, unless it is one for a number of dimensions."""
    taken = set(assign(parameters, groups))
    for number, group in enumerate(groups):
        if number in taken or _DIMENSIONS.fullmatch(group[MATCH]):
            continue
        names = [name for names, _ in parameters for name in names]
        matching = sum(found is not None for found in assign(parameters, [group]))
        if matching:
            problem, hint = f"all {matching} parameters that it matches are in earlier groups", "Change their order."
        else:
            problem = "matches no parameter that is trained"
            near = did_you_mean(group[MATCH], names).strip()
            hint = near or f"Names: {first_names(names, 8)}."
        raise ConfigError(f"optimizer.groups[{number}].match", group[MATCH], f"{problem}.", hint)


def arguments_of(plan: OptimizerPlan, group: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of the optimizer for the parameters of ``group``; None: for parameters in no group."""
    own = {name: value for name, value in (group or {}).items() if name not in (MATCH, TARGET)}
    if group is not None and TARGET in group:
        return own
    if plan.kind is OptimizerKind.custom:
        return {**plan.arguments, "lr": plan.lr, **own}
    return {**{name: getattr(plan, name) for name in _ARGUMENTS[plan.kind]}, **own}


def _scaled(plan: OptimizerPlan, factor: float) -> OptimizerPlan:
    """Return ``plan`` with all learning rates multiplied by ``factor``."""
    groups = [{**group, "lr": group["lr"] * factor} if "lr" in group else group for group in plan.groups]
    return dataclasses.replace(plan, lr=plan.lr * factor, groups=groups)


def _scaled_betas(plan: OptimizerPlan, kappa: float) -> list[float]:
    """Return the betas for ``kappa`` times the reference batch, by the square root scaling rule of Adam.

    Malladi, Lyu, Panigrahi, Arora, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022),
    section 5: lr sqrt(kappa), 1 - kappa (1 - beta) for both betas, eps / sqrt(kappa). It does not cover weight decay.

    Raises:
        ConfigError: the optimizer is not Adam, or the batch is so large that a beta would not be above 0.
    """
    others = [name for group in plan.groups for name in group.keys() & {TARGET, "betas", "eps"}]
    if plan.kind is not OptimizerKind.adamw or others:
        what = f"a group with {others[0]}" if others else f"optimizer={plan.kind.value}"
        raise ConfigError(
            "optimizer.lr_scaling", "sqrt", f"is a rule for Adam, not for {what}.",
            "Use optimizer.lr_scaling=linear, the rule for SGD.",
        )  # fmt: skip
    betas = [1 - kappa * (1 - beta) for beta in plan.betas]
    if min(betas) < 1e-9:  # 0 up to rounding
        most = 1 / (1 - min(plan.betas))
        raise ConfigError(
            "optimizer.lr_scaling", "sqrt",
            f"the global batch is {kappa:.4g} times optimizer.reference_batch, which makes {plan.betas[0]:g} and "
            f"{plan.betas[1]:g} of optimizer.betas {betas[0]:.4g} and {betas[1]:.4g}; both must be above 0.",
            f"With these betas the rule reaches to {most:.4g} times the reference batch: tune lr at a larger one, or "
            "set the optimizer's values for this batch with optimizer.lr_scaling=none.",
        )  # fmt: skip
    return betas
