"""Straggler detection: how the ranks spend their time, and which rank delays the others.

Each rank's seconds of computing, of waiting for data and of waiting for other ranks are sent in the next window's small
all-reduce: one entry for each rank and kind, so that the sum is a table. This adds no collective and no waiting.

The time of computing is a window's time minus the waits. On CPUs the host measures them, since it is the host that is
blocked. On GPUs the host only queues work, and the wait is the time of collectives by the GPU's own events: a rank that
the others wait for spends the least time in them.
"""

from __future__ import annotations

import operator
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

from launcher.train.measure.observer import EndedWindow, Observer
from launcher.train.world import World

# windows over which medians are taken, and windows between two searches for a straggler
WINDOWS, LOOK_EVERY = 20, 10
# seconds per window; shorter delays are measurement error, or not worth reporting
NEGLIGIBLE_S = 0.01
# first windows of a process that are ignored, because they are not typical
_LEFT_OUT = 2
_COMPUTE, _DATA, _WAIT = range(3)
_KINDS = 3


@dataclass(frozen=True)
class TimeSplit:
    """Use of time in a window, in seconds: computing (mean and maximum over the ranks), waiting for other ranks (mean),
    and waiting for data (maximum)."""

    compute_s: float
    compute_max_s: float
    wait_s: float
    data_most_s: float


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, which delays the others. All figures are medians over ``windows`` windows.

    Args:
        share: fraction of a step's time that would be saved if the rank were as fast as the median of the others.
        excess_s: the same in seconds per window.
        of: cause of most of the excess, compute or data.
        own_s: the rank's seconds of that kind per window.
        others_s: median of the other ranks' seconds of that kind.
    """

    rank: int
    host: str
    share: float
    excess_s: float
    of: str
    own_s: float
    others_s: float
    windows: int

    def above(self, share: float, excess_s: float = NEGLIGIBLE_S) -> bool:
        """Return whether it costs at least ``share`` of a step, and at least ``excess_s`` seconds."""
        return self.share >= share and self.excess_s >= excess_s

    @property
    def text(self) -> str:
        doing = "computing" if self.of == "compute" else "waiting for data"
        return (
            f"rank {self.rank} on {self.host} makes a step {self.share:.0%} longer: {self.own_s:.3g} s of {doing} "
            f"a window, where the other ranks need {self.others_s:.3g} s (medians of {self.windows} windows)"
        )


class StragglerDetector(Observer):
    """Detector of the rank that slows the others down: the same state on all ranks, except for the own measurement.

    Args:
        share: value of ``Straggler.share`` from which on a rank is reported; None: never.
        spent: use of time in the previous window; None before the first table has arrived.
        straggler: the rank that is reported at present.
        named: the last rank that was reported.
        measured: number of windows of this process that were evaluated.
        slow: number of these windows in which each rank was the slowest by ``share`` or more.
        news: message on a change with the newest window; None if there is none.
    """

    def __init__(self, world: World, share: float | None) -> None:
        self._rank, self._ranks, self._share = world.rank, world.size, share
        self.width = _KINDS * world.size if world.size > 1 else 0
        self._hosts = world.of_all(socket.gethostname()) if self.width else []
        self._seconds = [0.0] * _KINDS
        self._windows = 0
        self._tables: deque[Sequence[float]] = deque(maxlen=WINDOWS)
        self.spent: TimeSplit | None = None
        self.straggler: Straggler | None = None
        self.named: Straggler | None = None
        self.measured, self.slow = 0, [0] * world.size
        self._verdict: int | None = None  # result of the last search
        self.news: str | None = None

    def contribution(self) -> Sequence[float]:
        """Return a table of zeros with this rank's row filled."""
        table = [0.0] * self.width
        if self.width:
            table[self._rank * _KINDS : (self._rank + 1) * _KINDS] = self._seconds
        return table

    def window_ended(self, window: EndedWindow) -> None:
        """Keep this rank's seconds of computing, waiting for data and waiting for other ranks."""
        busy_s = max(0.0, window.step_s - window.wait_s)
        data_s = min(window.data_s, busy_s)  # on a GPU collectives may run while the host waits for data
        self._seconds = [busy_s - data_s, data_s, window.wait_s]

    def receive(self, sums: Sequence[float]) -> None:
        """Evaluate the window before. ``sums``: the table of all ranks."""
        self.news, self._windows = None, self._windows + 1
        if not self.width or self._windows <= _LEFT_OUT:
            return
        self._tables.append(sums)
        compute, data, wait = sums[_COMPUTE::_KINDS], sums[_DATA::_KINDS], sums[_WAIT::_KINDS]
        self.spent = TimeSplit(fmean(compute), max(compute), fmean(wait), max(data))
        if self._share is None:
            return
        self.measured += 1
        busy = [*map(operator.add, compute, data)]
        # no rank is slower than the others by more than that, and few are by so much
        if max(busy) - min(busy) >= NEGLIGIBLE_S and (alone := slowest([sums], self._hosts)).above(self._share):
            self.slow[alone.rank] += 1
        if self.measured % LOOK_EVERY == 0:
            self._look(self._share)

    def metrics(self) -> dict[str, float]:
        """Return the ranks' use of time in the previous window, and the present straggler, for the record."""
        metrics: dict[str, float] = {}
        if (spent := self.spent) is not None:
            metrics["time/compute_s"], metrics["time/compute_s_max"] = spent.compute_s, spent.compute_max_s
            metrics["time/wait_s"] = spent.wait_s
        if (straggler := self.straggler) is not None:
            metrics |= {"straggler/rank": float(straggler.rank), "straggler/share": straggler.share}
        return metrics

    def summary(self) -> dict[str, Any]:
        """Return the entry of summary.json on the rank that was reported last; empty if none was."""
        if (named := self.named) is None:
            return {}
        return {
            "straggler": {
                "rank": named.rank, "host": named.host, "share": named.share, "of": named.of,
                "over": self.straggler is None, "steps": self.slow[named.rank], "measured": self.measured,
            }
        }  # fmt: skip

    def _look(self, share: float) -> None:
        """Search for a straggler. A report starts or ends only after two searches with the same result, because results
        vary near the limit."""
        before, now = self.straggler, slowest(self._tables, self._hosts)
        # hysteresis: a report lasts until the delay is below half the limits
        lasts = before is not None and before.rank == now.rank and now.above(share / 2, NEGLIGIBLE_S / 2)
        verdict = now.rank if lasts or now.above(share) else None
        agree, self._verdict = verdict == self._verdict, verdict
        if lasts:
            self.straggler = self.named = now
        elif agree and verdict is not None:
            self.straggler = self.named = now
            self.news = f"Straggler: {now.text}."
        elif agree and before is not None:
            self.straggler = None
            self.news = f"Straggler: no more. Rank {before.rank} on {before.host} no longer holds the others up."


def slowest(tables: Sequence[Sequence[float]], hosts: Sequence[str]) -> Straggler:
    """Return the slowest rank. ``tables``: for each window, the seconds of compute, data and wait of each rank."""
    ranks = range(len(hosts))
    compute, data = (
        [median_low(table[rank * _KINDS + kind] for table in tables) for rank in ranks] for kind in (_COMPUTE, _DATA)
    )
    busy = [sum(both) for both in zip(compute, data, strict=True)]
    rank = max(ranks, key=busy.__getitem__)

    def others(seconds: list[float]) -> float:
        return median_low(seconds[:rank] + seconds[rank + 1 :])

    excess_s = busy[rank] - others(busy)
    step_s = median_low(sum(table) / len(hosts) for table in tables)
    of, spent = max((("compute", compute), ("data", data)), key=lambda kind: kind[1][rank] - others(kind[1]))
    return Straggler(
        rank=rank,
        host=hosts[rank],
        share=excess_s / step_s if step_s > 0 else 0.0,
        excess_s=excess_s,
        of=of,
        own_s=spent[rank],
        others_s=others(spent),
        windows=len(tables),
    )
