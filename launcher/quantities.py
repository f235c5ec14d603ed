"""Sizes, counts, and measured values with their confidence interval, as numbers and as text.

A difference is claimed only if the interval excludes the value that means "no difference": 1 for a ratio, 0 for a
difference in seconds. The calibration computes the intervals; the summary of a run and the report read them back from
records (``NAME``, ``NAME_low``, ``NAME_high``).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self


def bytes_text(number: float) -> str:
    """Return a number of bytes as text, in B, kB, MB or GB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.2f} {unit}"


def number_text(value: float) -> str:
    """Return a value with four significant digits, or as a whole number from 1,000 on: 0.1235, 12.35, 12,346."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text, in ms or s."""
    return f"{number_text(seconds * 1e3)} ms" if seconds < 1 else f"{number_text(seconds)} s"


def duration_text(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes and hours, or hours and days."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def count(number: float, noun: str, nouns: str | None = None) -> str:
    """Return ``number`` with ``noun`` or, unless it is 1, its plural: 1 window, 2,000 windows, 2.5 items."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"
    return f"{text} {noun if number == 1 else nouns or noun + 's'}"


def first_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first ``most`` names, and how many there are besides: a, b, c, d and 3 more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# control characters but line feeds and tabs; marks that reorder text; parts of names that are not UTF-8
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return ``text`` with control characters as in Python's source, such as ``\\x1b``: a name, a path or a message
    that somebody else has written must not control the terminal."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the first ``most`` lines, and one that says how many there are besides."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


# fewest measurements with which an interval of order statistics reaches 95%
_SIGN_ROUNDS = 6
# with more, the normal approximation gives the same interval
_MANY_ROUNDS = 200
_WIDE = 2.5  # factor between the ends of an interval from which a ratio of speeds says nothing
# 97.5% quantile of Student's t distribution by number of values
_T_QUANTILE = {3: 4.303, 4: 3.182, 5: 2.776}


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return True if a difference from ``value`` may be claimed."""
        return not self.low <= value <= self.high

    def undecided(self, than: str = "") -> str:
        """Return the text on a ratio of speeds whose interval contains 1. ``than``: from what it does not differ."""
        ends = f"between {self.low:.2f} and {self.high:.2f} times as fast"
        if self.low * _WIDE < self.high:
            return f"not measured precisely enough ({ends}): the measured passes differ too much"
        return f"not distinguishable{than} ({ends})"

    @classmethod
    def of_record(cls, record: Mapping[str, Any], name: str) -> Self | None:
        """Return the figure ``name`` of a record or summary; None if it, or an end of its interval, is missing."""
        ends = [record.get(name + end) for end in ("", "_low", "_high")]
        return None if None in ends else cls(*map(float, ends))  # pyright: ignore[reportArgumentType]

    def as_record(self, name: str) -> dict[str, float]:
        """Return the three figures that ``of_record`` reads."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def interval(differences: Sequence[float]) -> Interval:
    """Return the typical difference of at least three paired measurements, with its 95% confidence interval.

    With six or more, it is the median with the narrowest pair of order statistics that covers the true median with 95%
    confidence (inverted sign test; for six values the lowest and the highest). With fewer no such pair exists, and it
    is the mean with Student's t interval.
    """
    ordered, n = sorted(differences), len(differences)
    if n < _SIGN_ROUNDS:
        mean = statistics.mean(ordered)
        half = _T_QUANTILE[n] * statistics.stdev(ordered) / math.sqrt(n)
        return Interval(mean, mean - half, mean + half)
    place = sign_place(n)
    return Interval(statistics.median(ordered), ordered[place], ordered[n - 1 - place])


@lru_cache(1000)
def sign_place(n: int) -> int:
    """Return the index, from 0, of the order statistic that begins the 95% interval of the median of ``n`` values."""
    if n > _MANY_ROUNDS:  # normal approximation of the binomial distribution, whose sums would take seconds
        quantile = statistics.NormalDist().inv_cdf(0.975)
        return math.floor((n - 1 - quantile * math.sqrt(n)) / 2)
    outside, place = 1, 0  # of 2^n equally likely signs, those with at most `place` of one kind
    while 2 * (outside + math.comb(n, place + 1)) <= 0.05 * 2**n:
        place += 1
        outside += math.comb(n, place)
    return place


def folded_names(names: Sequence[str]) -> str:
    """Return names such as ``node1,node2,node3,login`` in Slurm's notation, ``node[1-3],login``, in the same order."""
    parts = [re.fullmatch(r"(.*?)(\d*)", name) for name in names]
    groups: list[tuple[str, list[str]]] = []  # a stem, and the numbers that follow each other
    for stem, number in (match.groups() for match in parts if match is not None):
        before, numbers = groups[-1] if groups else ("", [""])
        last = numbers[-1]
        if before == stem and number and last and number == f"{int(last) + 1:0{len(last)}d}":
            numbers.append(number)
        else:
            groups.append((stem, [number]))
    return ",".join(stem + (each[0] if len(each) == 1 else f"[{each[0]}-{each[-1]}]") for stem, each in groups)


def speedup_text(record: Mapping[str, Any]) -> str | None:
    """Return the text on the speed-up over sync=every in a record or summary; None if it has no such figure.

    Args:
        record: has ``comm/speedup`` with its interval, ``comm/step_s`` and ``comm/step_s_every`` (seconds).
    """
    if (speedup := Interval.of_record(record, "comm/speedup")) is None:
        return None
    times = f"{record['comm/step_s'] * 1e3:,.1f} ms a step, {record['comm/step_s_every'] * 1e3:,.1f} ms with sync=every"
    if not speedup.excludes(1):
        return f"{speedup.undecided(' from no speed-up')}: {times}"
    return f"{speedup.value:.2f}x measured ({speedup.low:.2f} to {speedup.high:.2f}): {times}"


def seconds_left(first: Mapping[str, Any], last: Mapping[str, Any], steps: int | None) -> float | None:
    """Return the time from the record ``last`` to the end of a run at the mean rate since the record ``first``; None if
    it is unknown.

    Args:
        steps: of the whole run; None: a stream without an end.
    """
    if steps is None or last["step"] <= first["step"] or "time/total_s" not in first:
        return None
    per_step = (last["time/total_s"] - first["time/total_s"]) / (last["step"] - first["step"])
    return per_step * (steps - last["step"])


def exposed_text(record: Mapping[str, Any]) -> str | None:
    """Return the text on exposed communication in a record or summary; None if it has no such figure.

    Args:
        record: has ``comm/exposed_s`` (seconds a step) with its interval, and ``comm/overlap`` (0 to 1).
    """
    if (exposed := Interval.of_record(record, "comm/exposed_s")) is None:
        return None
    value, low, high = (seconds * 1e3 for seconds in (exposed.value, exposed.low, exposed.high))
    if not exposed.excludes(0) or exposed.value < 0:  # collectives cannot make a pass faster
        ends = f"95%: {low:,.1f} to {high:,.1f} ms"
        if high - low > record.get("comm/step_s", math.inf) * 1e3 / 2:
            return f"not measured precisely enough ({ends}): the measured passes differ too much"
        return f"no exposed communication measured ({ends})"
    shown = f"{value:,.1f} ms of a step ({low:,.1f} to {high:,.1f}) is exposed communication"
    return f"{shown}; {record['comm/overlap']:.0%} is hidden"


def prediction_text(record: Mapping[str, Any], *, has_memory: bool) -> str | None:
    """Return how far the figures of a record or summary are from their predictions; None if it has no pair of both.

    Args:
        record: has ``predicted/wire_bytes`` and ``predicted/peak_bytes``, and the measured figures; each pair only if
            it is known.
        has_memory: whether ``memory/peak_bytes`` is that of the rank's tensors, as predicted. On a CPU it is not.
    """
    parts: list[str] = []
    for name, measured in (("memory", "memory/peak_bytes"), ("wire bytes", "comm/wire_bytes")):
        expected, found = record.get(f"predicted/{measured.rpartition('/')[2]}"), record.get(measured)
        if expected is None or found is None or (name == "memory" and not has_memory):
            continue
        exact = found == expected
        text = "exact" if exact else f"{_deviation(found, expected)} ({bytes_text(expected)} predicted)"
        parts.append(f"{name} {text}")
    return ", ".join(parts) or None


def _deviation(measured: float, predicted: float) -> str:
    """Return by which share of the prediction a figure is above or below it."""
    if not predicted:
        return "above"
    share = measured / predicted - 1
    return f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
