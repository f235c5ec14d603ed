"""Intervals of paired measurements, and what may be claimed from them."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.quantities import (
    Interval,
    count,
    exposed_text,
    folded_names,
    interval,
    number_text,
    prediction_text,
    speedup_text,
)


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


def test_large_figures_have_no_exponent() -> None:
    """The report's fastest setting was given as 1.575e+04 samples/s beside 15,747.2 in its table."""
    assert [number_text(each) for each in (15_747.2, 999.96, 1411.4)] == ["15,747", "1,000", "1,411"]
    assert [number_text(each) for each in (0.123456, 12.3456, -2e4)] == ["0.1235", "12.35", "-20,000"]


def test_counts_have_a_plural_and_whole_numbers_no_fraction() -> None:
    assert [count(1, "item"), count(2000, "window")] == ["1 item", "2,000 windows"]
    assert count(3, "micro-batch", "micro-batches") == "3 micro-batches"
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
    assert text.startswith("not distinguishable from no speed-up (between ") == (not claimed)


def test_an_interval_that_says_nothing_is_no_result() -> None:
    text = speedup_text(speedup(1.2, 0.01, 4.51)) or ""
    assert text.startswith("not measured precisely enough (between 0.01 and 4.51 times as fast): ")
    times = {"comm/step_s": 0.6, "comm/overlap": 0.0}
    assert "precisely enough" in (exposed_text(times | Interval(0.05, -0.2, 0.3).as_record("comm/exposed_s")) or "")
    assert "no exposed" in (exposed_text(times | Interval(0.0, -0.02, 0.03).as_record("comm/exposed_s")) or "")


def test_a_record_without_an_interval_claims_neither_a_difference_nor_its_absence() -> None:
    """Versions before the calibration compared training windows with each other."""
    old = {"comm/speedup": 1.5, "comm/step_s": 0.2, "comm/step_s_every": 0.3, "comm/exposed_s": 0.1}
    assert speedup_text(old) is exposed_text(old) is None
    assert Interval.of_record(old, "comm/speedup") is None
    assert speedup_text({}) is exposed_text({}) is None


def test_a_record_gives_its_interval_back() -> None:
    found = Interval(1.5, 1.25, 2.0)
    assert Interval.of_record(found.as_record("x"), "x") == found


def unfolded(text: str) -> list[str]:
    """Return the names in Slurm's notation, as `scontrol show hostnames` does."""
    names: list[str] = []
    for stem, first, last in re.findall(r"([^,\[]+)(?:\[(\d+)-(\d+)\])?", text):
        numbers = [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] if first else [""]
        names += [stem + number for number in numbers]
    return names


@given(
    st.lists(
        st.tuples(st.sampled_from(["node", "gpu-a", "rack2-n", "login"]), st.integers(0, 1100), st.integers(1, 5)),
        max_size=4,
    ),
    st.booleans(),
)
def test_folded_names_are_the_same_names(runs: list[tuple[str, int, int]], padded: bool) -> None:
    numbered = [(stem, number) for stem, first, size in runs for number in range(first, first + size)]
    names = [f"{stem}{number:03d}" if padded else f"{stem}{number}" for stem, number in numbered]
    assert unfolded(folded_names(names)) == names


def test_names_that_follow_each_other_are_one_range() -> None:
    assert folded_names([f"node{n}" for n in range(1, 513)]) == "node[1-512]"
    assert folded_names(["a08", "a09", "a10", "login", "b1", "b3"]) == "a[08-10],login,b1,b3"
    assert folded_names([]) == ""


def test_how_far_off_a_prediction_of_bytes_was() -> None:
    sent = {"predicted/wire_bytes": 2000, "predicted/peak_bytes": 10**9, "memory/peak_bytes": 9 * 10**8}
    exact = sent | {"comm/wire_bytes": 2000}
    assert prediction_text(exact, has_memory=False) == "wire bytes exact"
    assert prediction_text(exact, has_memory=True) == "memory 10.0% below (1.00 GB predicted), wire bytes exact"
    more = sent | {"comm/wire_bytes": 2002}
    assert prediction_text(more, has_memory=False) == "wire bytes 0.1% above (2.00 kB predicted)"


def test_nothing_is_compared_without_both_figures() -> None:
    assert prediction_text({}, has_memory=True) is None
    assert prediction_text({"predicted/wire_bytes": 1}, has_memory=True) is None
    assert prediction_text({"time/step_s": 1.0, "comm/wire_bytes": 7}, has_memory=True) is None
