"""What the ranks' time goes into, and which of them holds the others up.

Each rank's seconds of computing, of waiting for data and of waiting for other ranks go with the next window's small
all-reduce: one place for each rank and kind, so that the sum is a table. Nobody waits for it, and no collective is
added.

Computing is what is left of a window once the waits are taken away. On a CPU the host's clock knows them: it is the
host that is blocked. On a GPU the host only queues work up, and what it waits for says little of what the GPU does, so
nothing is sent there.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

import torch

from launcher.train.world import World

# in which a rank's usual time is looked for; and from one look to the next
WINDOWS, LOOK_EVERY = 20, 10
# seconds a window: a shorter delay is that of the measurement, or of nothing that is worth a search
NEGLIGIBLE_S = 0.01
# of a process that has just started, whose first windows are not typical
_LEFT_OUT = 2
_COMPUTE, _DATA, _WAIT = range(3)
_KINDS = 3


@dataclass(frozen=True)
class Spent:
    """Seconds of a window: of computing, on average over the ranks and at most; of waiting for other ranks; and of
    waiting for data, at most."""

    compute_s: float
    compute_most_s: float
    wait_s: float
    data_most_s: float


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up.

    Args:
        share: of a step's time that would be saved, were it as fast as the median of the other ranks.
        excess_s: seconds of a window that this is; both medians over ``windows`` windows.
        of: what it spends that on, compute or data; own_s: its seconds of that, others_s: the others' median.
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
    def words(self) -> str:
        doing = "computing" if self.of == "compute" else "waiting for data"
        return (
            f"rank {self.rank} on {self.host} makes a step {self.share:.0%} longer: {self.own_s:.3g} s of {doing} "
            f"a window, where the other ranks need {self.others_s:.3g} s (medians of {self.windows} windows)"
        )


def places(world_size: int, device: torch.device) -> int:
    """How many numbers the ranks share."""
    return _KINDS * world_size if world_size > 1 and device.type == "cpu" else 0


class Pace:
    """One rank's account of it, alike on all ranks but for what it measures itself.

    Args:
        share: from which on the slowest rank is named; None: never.
        spent: of the newest window that is known, which is the one before; None while none is.
        straggler: the rank that is named now; named: the last one that was.
        measured: windows of this process that were looked at; slow: in how many of them each rank was the slowest by
            the share or more.
        news: what has changed about it with the newest window, in words; None for nothing.
    """

    def __init__(self, world: World, device: torch.device, share: float | None) -> None:
        self._rank, self._ranks, self._share = world.rank, world.size, share
        self._places = places(world.size, device)
        self._hosts = world.of_all(socket.gethostname()) if self._places else []
        self._own = [0.0] * _KINDS
        self._windows = 0
        self._tables: deque[Sequence[float]] = deque(maxlen=WINDOWS)
        self.spent: Spent | None = None
        self.straggler: Straggler | None = None
        self.named: Straggler | None = None
        self.measured, self.slow = 0, [0] * world.size
        self._verdict: int | None = None  # the rank that the last look found
        self.news: str | None = None

    def measure(self, step_s: float, data_s: float, wait_s: float) -> None:
        """This rank's part of a window, in seconds: in all, for data, and for other ranks."""
        self._own = [max(0.0, step_s - data_s - wait_s), data_s, wait_s]

    def numbers(self) -> list[float]:
        """What the next window's flags take along: this rank's row in a table of zeros."""
        table = [0.0] * self._places
        if self._places:
            table[self._rank * _KINDS : (self._rank + 1) * _KINDS] = self._own
        return table

    def take_in(self, table: Sequence[float]) -> None:
        """The sum of what all ranks have sent."""
        self.news, self._windows = None, self._windows + 1
        if not self._places or self._windows <= _LEFT_OUT:
            return
        self._tables.append(table)
        compute, data, wait = (table[kind::_KINDS] for kind in range(_KINDS))
        self.spent = Spent(fmean(compute), max(compute), fmean(wait), max(data))
        if self._share is None:
            return
        self.measured += 1
        if (alone := slowest([table], self._hosts)).above(self._share):
            self.slow[alone.rank] += 1
        if self.measured % LOOK_EVERY == 0:
            self._look(self._share)

    def _look(self, share: float) -> None:
        """Two looks in a row must agree before a rank is named, or is named no more: near the limit verdicts vary."""
        before, now = self.straggler, slowest(self._tables, self._hosts)
        # whoever is named stays so until it is clearly over
        lasts = before is not None and before.rank == now.rank and now.above(share / 2, NEGLIGIBLE_S / 2)
        verdict = now.rank if lasts or now.above(share) else None
        agree, self._verdict = verdict == self._verdict, verdict
        if lasts:
            self.straggler = self.named = now
        elif agree and verdict is not None:
            self.straggler = self.named = now
            self.news = f"Straggler: {now.words}."
        elif agree and before is not None:
            self.straggler = None
            self.news = f"Straggler: no more. Rank {before.rank} on {before.host} no longer holds the others up."


def slowest(tables: Sequence[Sequence[float]], hosts: Sequence[str]) -> Straggler:
    """Return the slowest rank. ``tables``: of each window the seconds of each rank's compute, data and wait."""
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
