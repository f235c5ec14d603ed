"""Calls that only rank 0 of a site makes, and whose results all its ranks get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import ConfigError, SiteError
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.train.world import World

T = TypeVar("T")
_MEET_S = 5.0  # seconds after which the ranks meet again while rank 0 still waits


class RankZero:
    """Rank 0 of a site, seen from each of its ranks. All of them call its methods, in the same order.

    Args:
        stop: whether this rank was asked to stop.
    """

    def __init__(self, world: World, stop: Callable[[], bool]) -> None:
        self._world, self._stop = world, stop

    def value(self, value: T) -> T:
        """Return the ``value`` of rank 0."""
        return self._world.of_rank_0(value)

    def call(self, call: Callable[[], T], *, unless_stopped: bool = False) -> T:
        """Return what ``call`` returns on rank 0, however long it takes. A ConfigError or SiteError there is raised on
        all ranks.

        Args:
            unless_stopped: return None instead of a SiteError if this site was asked to stop.
        """
        called = _Called(call) if self._world.rank == 0 else None
        result: tuple[Any, Exception | None] | None = None
        while result is None:  # the ranks meet meanwhile: no collective may take as long as an upload
            if called is not None and called.ended(_MEET_S):
                gives_up = unless_stopped and isinstance(called.error, SiteError) and self._stop()
                result = called.value, None if gives_up else called.error
            result = self._world.of_rank_0(result)
            HEARTBEAT.beat(Phase.waiting)
        value, error = result
        if error is not None:
            raise error
        return value

    def broadcast(self, values: list[bytes | None], size: int) -> Tensor:
        """Return the last ``size`` bytes of the only one of rank 0's ``values``; other ranks have none."""
        data = torch.empty(size, dtype=torch.uint8)
        if size and values and values[0] is not None:
            data = torch.frombuffer(bytearray(values[0][-size:]), dtype=torch.uint8)
        if self._world.size > 1:
            dist.broadcast(data, 0)
        return data


class _Called(threading.Thread):
    """Call in a thread that does not keep the process alive.

    Attributes:
        value: what it has returned.
        error: the ConfigError or SiteError that has ended it.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="outer", daemon=True)
        self._call = call
        self.value: Any = None
        self.error: Exception | None = None
        self._defect: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call()
        except (ConfigError, SiteError) as error:
            self.error = error
        except BaseException as error:
            self._defect = error

    def ended(self, wait_s: float) -> bool:
        """Return whether it has ended, after at most ``wait_s``. Raises what no user can have caused."""
        self.join(wait_s)
        if self._defect is not None:
            raise self._defect
        return not self.is_alive()
