"""Patient access to the store of sites that are jobs of their own, by rank 0 of each."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from launcher.errors import SiteError
from launcher.exchange.store import DirectoryStore, ExchangeStore, HttpsStore, server_address
from launcher.plan.outer import OuterPlan
from launcher.tls import client_context

T = TypeVar("T")
_POLL_S = (0.05, 1.0)  # the shortest and the longest time between two looks into the store
_REPORT_S, _GIVE_UP_S = 30.0, 1200.0  # of a store that cannot be reached
_GIVE_UP_STOPPING_S = 3.0


class OuterExchange(NamedTuple):
    """Exchange of a fragment after an optimizer step. They have this order."""

    step: int
    fragment: int

    @property
    def name(self) -> str:
        return f"exchange/{self.step:08d}.{self.fragment}"


BEFORE_ALL = OuterExchange(0, -1)


@dataclasses.dataclass(frozen=True)
class Closed:
    """A closed exchange.

    Attributes:
        members: numbers of the sites whose outer gradients are averaged.
        saved: step of the newest checkpoint of each site, as far as it is known.
    """

    exchange: OuterExchange
    members: list[int]
    saved: Mapping[str, int] = dataclasses.field(default_factory=dict)


def open_store(plan: OuterPlan) -> ExchangeStore:
    """Return the store of a plan.

    Raises:
        ConfigError: the address or the key cannot be used.
        SiteError: the directory cannot be written.
    """
    assert plan.store is not None
    address = server_address(plan.store)
    if address is not None:
        assert plan.key is not None
        return HttpsStore(*address, client_context(Path(plan.key), "outer.key"))
    try:
        return DirectoryStore(Path(plan.store))
    except OSError as error:
        raise SiteError(
            f"outer.store={plan.store}: {error.strerror}.\n  Use a directory that all sites can write."
        ) from None


class PatientStore:
    """Store that repeats what failed because the store could not be reached.

    Args:
        stop: whether the job was asked to stop; then it gives up within seconds.
    """

    def __init__(self, plan: OuterPlan, stop: Callable[[], bool] = lambda: False) -> None:
        self._name, self._patience_s, self._store = plan.store, plan.patience_s, open_store(plan)
        self._stop, self._reached = stop, False

    def post(self, name: str, value: bytes) -> bool:
        return self._patiently(lambda: self._store.post(name, value))

    def get(self, name: str) -> bytes | None:
        return self._patiently(lambda: self._store.get(name))

    def names(self, above: str) -> set[str]:
        return self._patiently(lambda: self._store.names(above))

    def remove(self, name: str) -> None:
        self._patiently(lambda: self._store.remove(name))

    def closed(self, exchange: OuterExchange) -> Closed | None:
        """Return the list of members of an exchange; None: it is still open."""
        found = self.get(f"{exchange.name}/members")
        return None if found is None else Closed(exchange, **json.loads(found))

    def close(self) -> None:
        self._store.close()

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def decide(self, name: str, own: bytes) -> bytes:
        """Return the value of ``name``, which is ``own`` if there was none."""
        if self.post(name, own):
            return own
        value = self.get(name)
        return own if value is None else value

    def tries(self, wait: Callable[[float], object] = time.sleep) -> Iterator[bool]:
        """Yield True until outer.patience_s has passed, then False, without end, with pauses that become longer.

        Args:
            wait: waits for so many seconds, or less.
        """
        began, (pause, longest) = time.monotonic(), _POLL_S
        while True:
            yield time.monotonic() - began < self._patience_s
            wait(pause)
            pause = min(longest, 1.2 * pause)

    def wait_for(self, name: str) -> bytes | None:
        """Return a value that may not be there yet; None: it was not there within outer.patience_s."""
        for in_time in self.tries():
            value = self.get(name)
            if value is not None or not in_time:
                return value
        raise AssertionError("the loop has no end")

    def _patiently(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns, which is repeated while the store cannot be reached.

        Raises:
            SiteError: it could not be reached for twenty minutes, or until the job was asked to stop.
        """
        began, reported, pause = time.monotonic(), False, 0.2
        while True:
            try:
                value = call()
            except OSError as error:
                waited = time.monotonic() - began
                if waited > (_GIVE_UP_STOPPING_S if self._stop() else _GIVE_UP_S):
                    raise SiteError(f"outer.store={self._name} cannot be reached: {error}.") from None
                if not reported and (waited > _REPORT_S or not self._reached):
                    reported = True
                    limit = f"Trying again for {_GIVE_UP_S / 60:.0f} minutes."
                    print(f"outer.store={self._name} cannot be reached: {error}. {limit}", flush=True)
                time.sleep(pause)
                pause = min(5.0, 2 * pause)
            else:
                if reported:
                    print(f"outer.store={self._name} is there again.", flush=True)
                self._reached = True
                return value
