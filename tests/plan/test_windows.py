"""A global batch that changes on the way: the past stays what it was, and no sample is lost or comes twice."""

from __future__ import annotations

import random

import pytest

from launcher.plan.batch import Batch, RampStage
from launcher.plan.windows import Windows, changed_at, future, past


def batch(size: int, *ramp: tuple[int, int]) -> Batch:
    stages = tuple(RampStage(windows=windows, global_size=samples) for windows, samples in ramp)
    return Batch(global_size=size, micro_size=1, accumulation=size, world_size=1, ramp=stages)


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_of_an_epoch_comes_once(seed: int) -> None:
    generator = random.Random(seed)
    samples, at, now = generator.randrange(40, 90), 0, batch(generator.randrange(2, 20))
    sizes: list[int] = []
    for _ in range(3):
        begin, at = at, at + generator.randrange(1, 30)
        sizes += [now.global_size] * (at - begin)
        before = past(now, at)
        now = changed_at(now, batch(generator.randrange(2, 20)), at)
        assert past(now, at) == before
        assert future(now, at) == ((), now.global_size)
    assert [now.global_size_at(index) for index in range(at)] == sizes
    windows = Windows(samples, now, keep_short=True)
    seen: dict[int, list[int]] = {}
    for index in range(windows.before(at)):
        span = windows.at(index)
        seen.setdefault(span.epoch, []).extend(range(span.first, span.first + span.size))
    assert all(positions == list(range(samples)) for positions in seen.values())


def test_ramps_before_and_after() -> None:
    old, new = batch(32, (10, 8), (10, 16)), batch(64, (12, 16), (30, 32))
    assert changed_at(old, new, 15) == batch(64, (10, 8), (5, 16), (27, 32))
    assert changed_at(old, old, 15) == old
    assert changed_at(batch(8), batch(8), 100) == batch(8)
    assert past(old, 25) == past(batch(32, (10, 8), (10, 16)), 25)
    assert past(old, 25) != past(batch(32), 25)
    assert future(old, 20) == future(batch(32), 20)
    assert future(old, 19) != future(batch(32), 19)
