"""A loss curve as it is drawn: thinned, without hiding what stands out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# of a drawn curve: more than a screen has columns for
POINTS = 300
SMOOTH_POINTS = 150


@dataclass(frozen=True)
class Curve:
    """Parallel columns. ``seconds``: of training, wall time."""

    steps: array[float]
    samples: array[float]
    seconds: array[float]
    losses: array[float]


def thinned(
    steps: Sequence[float],
    samples: Sequence[float],
    seconds: Sequence[float],
    losses: Sequence[float],
    points: int = POINTS,
) -> Curve:
    """About ``points`` records: the first and the last, and of each of equally long stretches the one with the lowest
    and the one with the highest loss, so that no spike is lost. A loss that is not finite breaks the curve."""
    count = len(steps)
    kept = range(count) if count <= points else _extremes(losses, count, points // 2 - 1)
    columns = ([column[place] for place in kept] for column in (steps, samples, seconds, losses))
    return Curve(*(array("d", column) for column in columns))


def _extremes(losses: Sequence[float], count: int, stretches: int) -> list[int]:
    kept = {0, count - 1}
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [place for place in places if losses[place] == losses[place]]
        if finite:
            kept |= {min(finite, key=losses.__getitem__), max(finite, key=losses.__getitem__)}
        if len(finite) < len(places):
            kept.add(next(place for place in places if losses[place] != losses[place]))
    return sorted(kept)
