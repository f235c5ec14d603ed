"""How far one gradient is from another: in all, by groups of parameters, and where most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor

from launcher.certificate import Comparison, Deviation, Rule

Gradient = dict[str, Tensor | None]
WORST = 5


def _norm_of_difference(one: Tensor | None, two: Tensor | None) -> float:
    """In fp64; a gradient that is missing is zero."""
    if one is None and two is None:
        return 0.0
    if one is None or two is None:
        only = two if one is None else one
        assert only is not None
        return only.double().norm().item()
    return (one.double() - two.double()).norm().item()


def _norm(gradient: Tensor | None) -> float:
    return _norm_of_difference(gradient, None)


def _together(norms: Iterable[float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))


def distance(one: Gradient, two: Gradient) -> float:
    """||one - two|| / ||one||; infinite where only one of them is zero."""
    apart = _together(_norm_of_difference(one[name], two[name]) for name in one)
    size = _together(_norm(one[name]) for name in one)
    if not apart:
        return 0.0
    return apart / size if size else math.inf


def compare(arithmetic: str, got: Gradient, wanted: Gradient, rounded: Gradient, rule: Rule) -> Comparison:
    """Return the deviation of the gradient ``got`` from the one that was ``wanted``, judged by ``rule``.

    Args:
        rounded: the gradient of one big batch in the arithmetic of ``got``: its distance from ``wanted`` is the
            rounding error from which the limits follow.
    """
    off = {name: _norm_of_difference(got[name], wanted[name]) for name in wanted}
    rounding = {name: _norm_of_difference(rounded[name], wanted[name]) for name in wanted}
    norms = {name: _norm(wanted[name]) for name in wanted}
    numel = {name: 0 if (one := got[name]) is None else one.numel() for name in wanted}
    total = _together(norms.values())
    one_batch = _ratio(_together(rounding.values()), total)
    uncapped = None if one_batch is None or not math.isfinite(one_batch) else rule.uncapped(one_batch)
    limit = rule.most if uncapped is None else min(rule.most, uncapped)

    def deviation(title: str, names: Iterable[str], *, part: bool) -> Deviation:
        names = list(names)
        apart, norm = _together(off[name] for name in names), _together(norms[name] for name in names)
        allowed = limit
        if part:  # its own rounding error, or its share of the whole gradient's
            own = rule.times * _together(rounding[name] for name in names)
            shares = (limit / 10, _ratio(own, total), (uncapped or limit) * norm / (total or 1.0))
            allowed = max(share for share in shares if share is not None and math.isfinite(share))
        return Deviation(
            name=title,
            parameters=sum(numel[name] for name in names),
            norm=norm,
            error=_ratio(apart, norm),
            share=_ratio(apart, total),
            limit=allowed,
        )

    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, group in _grouped(list(wanted)).items():
        groups[group].append(name)
    each = [deviation(name, [name], part=True) for name in wanted]
    return Comparison(
        arithmetic=arithmetic,
        one_batch=None if uncapped is None else one_batch,
        uncapped=uncapped,
        whole=deviation("all", wanted, part=False),
        groups=tuple(deviation(group, names, part=True) for group, names in groups.items()),
        worst=tuple(sorted(each, key=lambda one: one.excess, reverse=True)[:WORST]),
    )


def _ratio(off: float, norm: float) -> float | None:
    return off / norm if norm else (None if off else 0.0)


def _grouped(names: list[str]) -> dict[str, str]:
    """Each parameter's group: the modules just below where the names part, so that there are several of them."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    return {name: ".".join(part[: common + 1]) for name, part in zip(names, parts, strict=True)}
