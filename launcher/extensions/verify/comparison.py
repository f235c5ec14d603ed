"""Gradient comparison: distance of the whole gradient and of parameter groups, with dropout disabled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from launcher.extensions.verify.certificate import Comparison, Deviation, Rule


def dropout_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules with active dropout."""
    names: list[str] = []
    for name, module in model.named_modules():
        layer = isinstance(module, _DropoutNd) and module.p > 0
        inside = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if (layer or inside) and module.training:
            names.append(name)
    return names


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
