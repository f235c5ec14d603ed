"""Gradient comparison: distance of the whole gradient and of parameter groups, with dropout disabled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from launcher.verify.certificate import Comparison, Deviation, Rule

_DROPOUTS = {
    getattr(place, name)
    for place in (functional, torch)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    )
    if hasattr(place, name)
}  # fmt: skip
_ATTENTION = functional.scaled_dot_product_attention
_ATTENTION_DROPOUT = 4  # position of dropout_p among the arguments


def dropout_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules with active dropout."""
    names: list[str] = []
    for name, module in model.named_modules():
        layer = isinstance(module, _DropoutNd) and module.p > 0
        inside = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if (layer or inside) and module.training:
            names.append(name)
    return names


@contextmanager
def without_dropout(model: nn.Module, *, functions: bool = True) -> Iterator[None]:
    """Disable dropout of modules and, with ``functions``, of torch's functions in forward and backward passes.

    The modules are switched separately because recomputation in backward runs in another thread, in which the functions
    are not intercepted.
    """
    off = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]
    inside = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention | nn.RNNBase)]
    rates = [module.dropout for module in inside]
    for module in off:
        module.training = False
    for module in inside:
        module.dropout = 0.0
    try:
        if functions:
            with _NoDropout():
                yield
        else:
            yield
    finally:
        for module in off:
            module.training = True
        for module, rate in zip(inside, rates, strict=True):
            module.dropout = rate


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is _ATTENTION:
            args = (*args[:_ATTENTION_DROPOUT], *((0.0,) if len(args) > _ATTENTION_DROPOUT else ()), *args[5:])
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)


# by parameter name; zero where the loss does not depend on the parameter
Gradient = dict[str, Tensor]
WORST = 5


def _norm_of_difference(one: Tensor, two: Tensor) -> float:
    return (one.double() - two.double()).norm().item()


def _norm(gradient: Tensor) -> float:
    return gradient.double().norm().item()


def _combined(norms: Iterable[float]) -> float:
    """Return the norm of a vector whose parts have these norms."""
    return math.sqrt(sum(norm * norm for norm in norms))


def distance(one: Gradient, two: Gradient) -> float:
    """Return ||one - two|| / ||one||; infinite if only ``one`` is zero."""
    difference = _combined(_norm_of_difference(one[name], two[name]) for name in one)
    ratio = _ratio(difference, _combined(_norm(one[name]) for name in one))
    return math.inf if ratio is None else ratio


def compare_gradients(arithmetic: str, got: Gradient, wanted: Gradient, rounded: Gradient, rule: Rule) -> Comparison:
    """Return the deviation of the gradient ``got`` from ``wanted``, judged by ``rule``.

    Args:
        rounded: gradient of one big batch in the arithmetic of ``got``; its distance from ``wanted`` is the rounding
            error from which the limits follow.
    """
    errors = {name: _norm_of_difference(got[name], wanted[name]) for name in wanted}
    rounding = {name: _norm_of_difference(rounded[name], wanted[name]) for name in wanted}
    norms = {name: _norm(wanted[name]) for name in wanted}
    total = _combined(norms.values())
    one_batch = _ratio(_combined(rounding.values()), total)
    uncapped = None if one_batch is None or not math.isfinite(one_batch) else rule.uncapped(one_batch)
    limit = rule.most if uncapped is None else min(rule.most, uncapped)

    def deviation(title: str, names: Sequence[str], *, part: bool) -> Deviation:
        error, norm = _combined(errors[name] for name in names), _combined(norms[name] for name in names)
        allowed = limit
        if part:  # the part's own rounding error, or its share of the whole gradient's
            own = rule.times * _combined(rounding[name] for name in names)
            shares = (limit / 10, _ratio(own, total), (uncapped or limit) * norm / (total or 1.0))
            allowed = max(share for share in shares if share is not None and math.isfinite(share))
        return Deviation(
            name=title,
            parameters=sum(wanted[name].numel() for name in names),
            norm=norm,
            error=_ratio(error, norm),
            share=_ratio(error, total),
            limit=allowed,
        )

    each = [deviation(name, [name], part=True) for name in wanted]
    return Comparison(
        arithmetic=arithmetic,
        one_batch=None if uncapped is None else one_batch,
        uncapped=uncapped,
        whole=deviation("all", [*wanted], part=False),
        groups=tuple(deviation(group, names, part=True) for group, names in _groups(list(wanted)).items()),
        worst=tuple(sorted(each, key=lambda one: one.excess, reverse=True)[:WORST]),
    )


def _ratio(error: float, norm: float) -> float | None:
    """Return ``error`` / ``norm``; None if only ``norm`` is zero."""
    return error / norm if norm else (None if error else 0.0)


def _groups(names: list[str]) -> dict[str, list[str]]:
    """Return the parameters by group: the modules at the first level at which the names differ."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, part in zip(names, parts, strict=True):
        groups[".".join(part[: common + 1])].append(name)
    return groups
