"""Rendezvous of the agents: their ranks, and the board on which they leave word for each other.

torch's own ways do not fit: `c10d` numbers hosts by the alphabetical order of their addresses, and `static` cannot
start workers again, because the store that they share with the agent remembers the attempt before.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from launcher.plan.launch_plan import LaunchPlan, Place

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler


BACKEND = "launcher"
_JOIN_WITHIN_S = 600
_LOOK_EVERY_S = 0.1
# why a round is closed where what happened is another host's to say
GIVEN_UP = "another host has given up"


# of a job on one host
ALONE = Place(node=0, address="localhost", interface="", store="localhost:0", shared=True)


def register(plan: LaunchPlan, place: Place, asked: Callable[[], signal.Signals | None]) -> None:
    """Make ``rdzv_backend=BACKEND`` known to torch, for this process. ``asked``: the signal to stop that has come.

    torch's agent asks the rendezvous several times a second whether more hosts are waiting. That is where a signal is
    raised as torch's own exception: nothing but the agent can catch it there, and the agent passes it on to its workers
    and waits for them.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, lambda _: _handler(plan, place, asked))


def _handler(plan: LaunchPlan, place: Place, asked: Callable[[], signal.Signals | None]) -> RendezvousHandler:
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class Rounds(RendezvousHandler):
        """One round an attempt, each with keys and with a master port of its own."""

        def __init__(self) -> None:
            self._store: Any = None
            self._round = 0

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                host, _, port = place.store.rpartition(":")
                self._wait_for_store(host, int(port))
                within = timedelta(seconds=_JOIN_WITHIN_S)
                self._store = TCPStore(
                    host, int(port), is_master=place.node == 0, timeout=within, wait_for_workers=False
                )
            self._round += 1
            self._store.set("round", str(self._round))  # never smaller: nobody is a round ahead of the last host
            self._wait_for_all()
            store = PrefixStore(f"round{self._round}", self._store)
            master = RendezvousStoreInfo.build(place.node, store, place.address)
            return RendezvousInfo(store, place.node, plan.cluster.nodes, master)

        def _stop_if_asked(self) -> None:
            if (number := asked()) is not None:
                raise SignalException("asked to stop", number)

        def _wait_for_store(self, host: str, port: int) -> None:
            """Before the store's own way of waiting, which no signal gets through."""
            end = time.monotonic() + _JOIN_WITHIN_S
            while True:
                self._stop_if_asked()
                if place.node == 0:
                    return None
                try:
                    return socket.create_connection((host, port), timeout=1).close()
                except OSError as error:
                    if time.monotonic() > end:
                        raise RendezvousClosedError(f"{place.store} does not answer: {error}") from error
                time.sleep(_LOOK_EVERY_S)

        def _wait_for_all(self) -> None:
            """A step at a time: a signal must get through, and a host that has given up comes no more."""
            key, end = f"here{self._round}", time.monotonic() + _JOIN_WITHIN_S
            try:
                here = self._store.add(key, 1)
                while here < plan.cluster.nodes:
                    self._stop_if_asked()
                    if self._store.check(["over"]):
                        raise RendezvousClosedError(GIVEN_UP)
                    if time.monotonic() > end:
                        raise RendezvousClosedError(f"{here} of {plan.cluster.nodes} hosts are here")
                    time.sleep(_LOOK_EVERY_S)
                    here = self._store.add(key, 0)
            except RuntimeError as error:  # the store went with node 0
                raise RendezvousClosedError(str(error)) from error

        def num_nodes_waiting(self) -> int:
            """Whether another host has begun the next round, because a worker of its own failed."""
            self._stop_if_asked()
            if not plan.cluster.max_restarts:
                return 0
            try:
                return int(int(self._store.get("round")) > self._round)
            except RuntimeError:  # node 0 is gone; its workers' peers notice, and so does `launch`
                return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None: ...

        def get_run_id(self) -> str:
            return plan.run.id

        def shutdown(self) -> bool:
            if self._store is not None:
                with suppress(RuntimeError):  # node 0 may have gone, and the store with it
                    self._store.set("over", "1")
            return True

    return Rounds()


class Gone(Exception):
    """The board went with node 0."""


class Board(Protocol):
    def post(self, key: str, text: str) -> None:
        """In place of what was there."""
        ...

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Of those that are there."""
        ...


class OwnBoard:
    """Of a job on one host."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self._texts[key] = text

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        return {key: self._texts[key] for key in keys if key in self._texts}


class StoreBoard:
    """On the store that node 0's agent has for the rounds, over a connection of its own: torch's agent asks the same
    store, and neither waits for the other."""

    def __init__(self, place: Place) -> None:
        self._host, _, port = place.store.rpartition(":")
        self._port = int(port)
        self._store: Any = None

    def _connected(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        if self._store is None:
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)
            self._store = PrefixStore("board", store)
        return self._store

    def post(self, key: str, text: str) -> None:
        """Raises Gone, as ``read`` does."""
        try:
            self._connected().set(key, text)
        except RuntimeError as error:
            raise Gone(str(error)) from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        try:
            store = self._connected()
            return {key: store.get(key).decode() for key in keys if store.check([key])}
        except RuntimeError as error:
            raise Gone(str(error)) from error
