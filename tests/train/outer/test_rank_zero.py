"""Calls of rank 0 that take long: the other ranks meet it meanwhile, and get its result or its error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from launcher.errors import ConfigError, SiteError
from launcher.train.outer import rank_zero
from launcher.train.outer.rank_zero import RankZero
from launcher.train.world import World


class TwoRanks:
    """Two ranks of a site, as threads."""

    def __init__(self) -> None:
        self._barrier, self.meetings = threading.Barrier(2), 0
        self._value: Any = None

    def world(self, rank: int) -> World:
        world = World(rank, 2, rank)
        object.__setattr__(world, "of_rank_0", lambda value: self._of_rank_0(rank, value))
        return world

    def _of_rank_0(self, rank: int, value: Any) -> Any:
        if rank == 0:
            self._value, self.meetings = value, self.meetings + 1
        self._barrier.wait(60)
        value = self._value
        self._barrier.wait(60)
        return value

    def call(self, called: Callable[[], Any], *, stop: bool = False, unless_stopped: bool = False) -> list[Any]:
        """Return the results, or errors, of both ranks."""
        results: list[Any] = [None, None]

        def run(rank: int) -> None:
            own = called if rank == 0 else lambda: pytest.fail("only rank 0 calls")
            try:
                results[rank] = RankZero(self.world(rank), lambda: stop).call(own, unless_stopped=unless_stopped)
            except Exception as error:
                results[rank] = str(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def test_the_ranks_meet_while_rank_0_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "_MEET_S", 0.05)
    ranks = TwoRanks()

    def called() -> int:
        time.sleep(1)
        return 7

    assert ranks.call(called) == [7, 7]
    assert ranks.meetings > 3


def test_an_error_of_rank_0_is_raised_on_all_ranks() -> None:
    def fails() -> None:
        raise ConfigError("outer.key", None, "the server has another key.")

    results = TwoRanks().call(fails, stop=True, unless_stopped=True)
    assert results[0] == results[1]
    assert "another key" in results[0]


@pytest.mark.parametrize(("stop", "gives_up"), [(True, True), (False, False)])
def test_a_site_that_is_to_stop_does_not_fail_for_the_store(stop: bool, gives_up: bool) -> None:
    def fails() -> None:
        raise SiteError("outer.store cannot be reached")

    wanted = None if gives_up else "outer.store cannot be reached"
    assert TwoRanks().call(fails, stop=stop, unless_stopped=True) == [wanted, wanted]
    assert TwoRanks().call(fails, stop=stop)[1] == "outer.store cannot be reached"
