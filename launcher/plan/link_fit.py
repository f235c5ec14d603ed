"""Fit of the links to measured collectives: latency and bandwidth of each level, and how far off the model is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.plan.links import Level, Links, Rate
from launcher.plan.sync_policy import Collective

# payloads that show the latency, and those that show the bandwidth and in which the error counts: smaller ones take
# little of a step
SMALL_BYTES, LARGE_BYTES = 2**14, 2**20
_LEAST_ERROR = 0.03
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured collective.

    Attributes:
        payload_bytes, ranks, hosts, groups: as in ``Links.seconds``; the groups ran at the same time.
        seconds: on the slowest rank.
    """

    kind: Collective
    payload_bytes: int
    ranks: int
    hosts: int
    groups: int
    seconds: float

    def predict(self, links: Links) -> float:
        """Return the seconds that the model gives."""
        return links.seconds(self.kind, self.payload_bytes, ranks=self.ranks, hosts=self.hosts, groups=self.groups)


def fit_levels(samples: Sequence[Sample], *, gloo: bool) -> tuple[Level | None, Level | None]:
    """Return the levels inside a host and between hosts that fit ``samples``; None if nothing was measured there.

    The level between hosts is fitted to groups with one rank on each host. Others use both levels, and count for the
    error only.
    """
    within = [sample for sample in samples if sample.hosts == 1]
    across = [sample for sample in samples if sample.hosts > 1]
    inside = _fit_level(within, gloo)
    between = _fit_level([sample for sample in across if sample.ranks == sample.hosts], gloo)
    if inside is not None:
        links = Links(inside=inside, between=None, gloo=gloo, source="")
        inside = dataclasses.replace(inside, error=_error_of(links, within))
    if between is not None:
        links = Links(inside=inside or between, between=between, gloo=gloo, source="")
        between = dataclasses.replace(between, error=_error_of(links, across))
    return inside, between


def _error_of(links: Links, samples: Iterable[Sample]) -> float:
    """Return the relative deviation that 90% of the large ``samples`` do not exceed."""
    off = sorted(abs(one.seconds / one.predict(links) - 1) for one in samples if one.payload_bytes >= LARGE_BYTES)
    return max(_LEAST_ERROR, off[math.ceil(0.9 * len(off)) - 1]) if off else 1.0


def _fit_level(samples: Sequence[Sample], gloo: bool) -> Level | None:
    """Return the level with a latency and a bandwidth for each kind; the level's own ones are those of all-reduces."""
    rates = {kind: _fit([one for one in samples if one.kind is kind], kind, gloo) for kind in Collective}
    found = {kind: rate for kind, rate in rates.items() if rate is not None}
    if Collective.all_reduce not in found:
        return None
    first = found.pop(Collective.all_reduce)
    return Level(latency_s=first.latency_s, bytes_per_s=first.bytes_per_s, error=0.0, own=tuple(found.values()))


def _fit(samples: Sequence[Sample], kind: Collective, gloo: bool) -> Rate | None:
    """Return the latency and bandwidth of one kind; None if the payloads were all small, or all large.

    Medians of what single measurements give: small payloads the latency, large ones the bandwidth. Unlike least
    squares, a measurement during which another process had the machine does not move them, nor do payloads between,
    which buffers on the way may hold.
    """
    rows = [(*_coefficients(sample, gloo), sample.seconds) for sample in samples]
    small = [row for sample, row in zip(samples, rows, strict=True) if sample.payload_bytes <= SMALL_BYTES]
    large = [row for sample, row in zip(samples, rows, strict=True) if sample.payload_bytes >= LARGE_BYTES]
    if not small or not large:
        return None
    latency_s = second_per_byte = 0.0
    for _ in range(_ROUNDS):  # each needs the other
        latency_s = max(0.0, median((seconds - moved * second_per_byte) / steps for steps, moved, seconds in small))
        # if the small ones were measured on a busy machine, at least half of the time is still that of the bytes
        second_per_byte = median(
            max(seconds - steps * latency_s, seconds / 2) / moved for steps, moved, seconds in large
        )
    return Rate(kind=kind, latency_s=latency_s, bytes_per_s=1 / second_per_byte)


def _coefficients(sample: Sample, gloo: bool) -> tuple[float, float]:
    """Return (steps, bytes), with which a sample takes steps * latency + bytes / bandwidth on its level."""
    step = Level(latency_s=1.0, bytes_per_s=math.inf, error=0.0)
    byte = Level(latency_s=0.0, bytes_per_s=1.0, error=0.0)
    steps, moved = (sample.predict(Links(inside=one, between=one, gloo=gloo, source="")) for one in (step, byte))
    return steps, moved
