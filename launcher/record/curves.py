"""Curves of a run's losses: smoothed, thinned and rounded as they are drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# number of latest logged losses to average, so that one lucky window does not count as reaching a loss
SMOOTHED_OVER = 10
# points per drawn curve; more could not be distinguished on a screen
POINTS = 300
SMOOTH_POINTS = 150


class Point(NamedTuple):
    """Loss after an optimizer step. ``seconds``: wall time of training; ``loss``: None if it is not finite."""

    step: float
    samples: float
    seconds: float
    loss: float | None


# the fields of points, one list each; none of a curve without points
Columns = list[list[float | None]]


def smoothed_points(points: Sequence[Point]) -> list[Point]:
    """Return each point with the mean of the latest SMOOTHED_OVER finite losses; None before the first."""
    latest: deque[float] = deque(maxlen=SMOOTHED_OVER)
    smoothed: list[Point] = []
    for step, samples, seconds, loss in points:
        if loss is not None:
            latest.append(loss)
        smoothed.append(Point(step, samples, seconds, sum(latest) / len(latest) if latest else None))
    return smoothed


def curve_json(points: Iterable[Point]) -> str:
    """Return the columns of points as JSON, rounded as by ``rounded``, but several times as fast for many runs."""
    return f"[{','.join(map(_column_json, zip(*points, strict=True)))}]"


def _column_json(values: tuple[float | None, ...]) -> str:
    if None in values:
        texts = ("null" if value is None else f"{value:.6g}" for value in values)
        return f"[{','.join(texts)}]"
    form = ",%.6g" * len(values)
    return f"[{form[1:] % values}]"


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to six digits: more are invisible in a plot, and would enlarge the page."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def thinned(points: list[Point], limit: int = POINTS) -> list[Point]:
    """Return about ``limit`` points: first, last, and the lowest and highest loss of each of equally long stretches.

    No spike is lost. A loss that is not finite interrupts the curve.
    """
    count, stretches = len(points), limit // 2 - 1
    if count <= limit:
        return points
    kept = {0, count - 1}
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [(loss, index) for index in stretch if (loss := points[index].loss) is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if points[index].loss is None))
    return [points[index] for index in sorted(kept)]


def fewer_points(columns: Columns, limit: int) -> Columns:
    """Return a curve with about ``limit`` points."""
    if limit >= POINTS or len(columns[0]) <= limit:
        return columns
    points = thinned([Point(*each) for each in zip(*columns, strict=True)], limit)
    return [[*column] for column in zip(*points, strict=True)]
