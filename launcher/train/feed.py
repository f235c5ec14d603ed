"""What a source of windows is: where a window lies, what it holds for this rank, who has more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from launcher.train.loader import MicroBatch

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Place:
    """Where a window lies: ``index`` in the run, ``window`` in its epoch."""

    index: int = 0
    epoch: int = 0
    window: int = 0


BEGINNING = Place()


@dataclass(frozen=True)
class Window:
    """One optimizer step's share of this rank: ``count`` micro-batches. ``index``: counted over the whole run."""

    index: int
    epoch: int
    count: int
    micro_batches: Iterator[MicroBatch]


class Feed(Protocol):
    """A source of windows.

    ``has_next``: this rank has a sample for the window after the one under way. ``settle`` takes what all ranks have
    said of that, and answers where the next window lies.
    """

    def windows(self) -> Iterator[Window]: ...
    def has_next(self) -> bool: ...
    def settle(self, anyone_has_next: bool) -> Place: ...
    def close(self) -> None: ...
