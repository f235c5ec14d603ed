"""How far one gradient is from another: in all, by groups of parameters, and where most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor

from launcher.certificate import Deviation

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


def distance(one: Mapping[str, Tensor | None], two: Mapping[str, Tensor | None]) -> float:
    """||one - two|| / ||one||; infinite where only one of them is zero."""
    apart = _together(_norm_of_difference(one[name], two[name]) for name in one)
    size = _together(_norm(one[name]) for name in one)
    if not apart:
        return 0.0
    return apart / size if size else math.inf


def deviations(
    got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]
) -> tuple[Deviation, tuple[Deviation, ...], tuple[Deviation, ...]]:
    """The whole gradient's deviation from what was ``wanted``, that of each group of parameters, and those of the
    parameters that are nearest to the verdict's limit, or beyond it."""
    apart = {name: _norm_of_difference(got[name], wanted[name]) for name in wanted}
    norms = {name: _norm(wanted[name]) for name in wanted}
    numel = {name: 0 if (one := got[name]) is None else one.numel() for name in wanted}
    total = _together(norms.values())

    def of(title: str, names: Iterable[str]) -> Deviation:
        names = list(names)
        off, norm = _together(apart[name] for name in names), _together(norms[name] for name in names)
        return Deviation(
            name=title,
            parameters=sum(numel[name] for name in names),
            norm=norm,
            error=_ratio(off, norm),
            share=_ratio(off, total),
        )

    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, group in _grouped(list(wanted)).items():
        groups[group].append(name)
    each = [of(name, [name]) for name in wanted]
    worst = sorted(each, key=lambda one: one.excess, reverse=True)[:WORST]
    return of("all", wanted), tuple(of(group, names) for group, names in groups.items()), tuple(worst)


def _ratio(off: float, norm: float) -> float | None:
    return off / norm if norm else (None if off else 0.0)


def _grouped(names: list[str]) -> dict[str, str]:
    """Each parameter's group: the modules just below where the names part, so that there are several of them."""
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    return {name: ".".join(part[: common + 1]) for name, part in zip(names, parts, strict=True)}
