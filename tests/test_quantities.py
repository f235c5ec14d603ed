"""Intervals of paired measurements, and what may be claimed from them."""

from __future__ import annotations

import math
import random

import pytest

from launcher.quantities import NO_INTERVAL, Interval, count, exposed_text, interval, speedup_text


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    """Skewed noise, as of a machine with other work; its median, and of few values its mean, is the truth."""
    draw = random.Random(1)
    for size, truth in ((4, 0.0), (6, 0.0), (15, 0.0), (20, 0.0)):
        hits = 0
        for _ in range(2000):
            times = [draw.gauss(0, 1) for _ in range(size)] if size < 6 else [
                draw.expovariate(1) - math.log(2) for _ in range(size)]  # fmt: skip
            hits += not interval(times).excludes(truth)
        assert hits / 2000 > 0.935, size


def test_counts_have_a_plural_and_whole_numbers_no_fraction() -> None:
    assert [count(1, "item"), count(2000, "window")] == ["1 item", "2,000 windows"]
    assert [count(2.5, "item"), count(1.0, "item")] == ["2.5 items", "1 item"]


def test_few_rounds_give_students_interval() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert (found.low, found.high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_many_rounds_give_order_statistics() -> None:
    assert interval([5.0, 1.0, 2.0, 3.0, 100.0, 4.0]) == Interval(3.5, 1.0, 100.0)
    assert interval([float(n) for n in range(20)]) == Interval(9.5, 5.0, 14.0), "of twenty: the 6th and the 15th"


def speedup(*ends: float) -> dict[str, float]:
    return {"comm/step_s": 0.2, "comm/step_s_every": 0.3, **Interval(*ends).as_record("comm/speedup")}


@pytest.mark.parametrize(
    ("low", "high", "claimed"), [(1.01, 1.9, True), (0.5, 0.99, True), (0.9, 1.9, False), (1.0, 1.9, False)]
)
def test_a_speedup_is_claimed_where_the_interval_excludes_1(low: float, high: float, claimed: bool) -> None:
    text = speedup_text(speedup((low + high) / 2, low, high))
    assert text is not None
    assert ("x measured (" in text) == claimed
    assert text.startswith("no difference measured (") == (not claimed)


def test_a_record_without_an_interval_claims_neither_a_difference_nor_its_absence() -> None:
    """Versions before the calibration compared training windows with each other."""
    old = {"comm/speedup": 1.5, "comm/step_s": 0.2, "comm/step_s_every": 0.3, "comm/exposed_s": 0.1}
    assert speedup_text(old) == exposed_text(old) == NO_INTERVAL
    assert Interval.of_record(old, "comm/speedup") is None
    assert speedup_text({}) is exposed_text({}) is None


def test_a_record_gives_its_interval_back() -> None:
    found = Interval(1.5, 1.25, 2.0)
    assert Interval.of_record(found.as_record("x"), "x") == found
