"""What becomes of the batch contract when a run goes on under another one: which windows its past had, and has.

A run's place in its data is the number of a window, so a global batch that changes on the way is a ramp: the windows
so far keep the sizes that they had, and the place in the epoch is that of the next sample, whatever comes then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from launcher.batch import Batch, Stage


def past(batch: Batch, index: int) -> tuple[Stage, ...]:
    """The sizes of the windows before ``index``, in stretches; alike for two batches that agree on each of them."""
    return _merged(_cut([*batch.ramp, Stage(windows=index, global_size=batch.global_size)], 0, index))


def future(batch: Batch, index: int) -> tuple[tuple[Stage, ...], int]:
    """Those from ``index`` on: stretches, and the size after them."""
    stages = list(_merged(_cut(batch.ramp, index, None)))
    while stages and stages[-1].global_size == batch.global_size:
        stages.pop()
    return tuple(stages), batch.global_size


def changed_at(old: Batch, new: Batch, index: int) -> Batch:
    """``new``, for a run whose windows before ``index`` were those of ``old``."""
    stages, size = future(new, index)
    before = past(old, index)
    ramp = _merged([*before, *stages])
    if not stages and before and before[-1].global_size == size:
        ramp = ramp[:-1]
    return dataclasses.replace(new, ramp=ramp)


def _cut(stages: Iterable[Stage], first: int, stop: int | None) -> list[Stage]:
    """What of ``stages`` lies in [first, stop)."""
    found: list[Stage] = []
    begin = 0
    for stage in stages:
        end = begin + stage.windows
        windows = (end if stop is None else min(end, stop)) - max(begin, first)
        if windows > 0:
            found.append(dataclasses.replace(stage, windows=windows))
        begin = end
    return found


def _merged(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    merged: list[Stage] = []
    for stage in stages:
        if merged and merged[-1].global_size == stage.global_size:
            merged[-1] = dataclasses.replace(stage, windows=merged[-1].windows + stage.windows)
        else:
            merged.append(stage)
    return tuple(merged)
