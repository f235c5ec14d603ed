"""Rendezvous of the agents: their node numbers, and the store in which they exchange messages.

torch's own backends do not fit: `c10d` numbers hosts by the alphabetical order of their addresses, and `static` cannot
restart workers, because the store that they share with the agent still holds the previous attempt.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launcher.launch.network import BACKLOG
from launcher.plan.launch_plan import HostPosition, LaunchPlan
from launcher.process import shared_interval, wait_until

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

BACKEND = "launcher"
_JOIN_WITHIN_S = 600
_POLL_S = 0.1
_LEAVE_WITHIN_S = 5
# reason of a closed round if another host reports the failure
GIVEN_UP = "another host has given up"


# place of a job on one host
ALONE = HostPosition(node=0, address="127.0.0.1", interface="", store="127.0.0.1:0", shared=True)


def _address(place: HostPosition) -> tuple[str, int]:
    host, _, port = place.store.rpartition(":")
    return host, int(port)


def _connect(place: HostPosition, **options: Any) -> Any:
    """Return a connection to the store of node 0's agent. ``options``: arguments of TCPStore."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(*_address(place), wait_for_workers=False, **options)


def _serve(listening: socket.socket, **options: Any) -> Any:
    """Return a store that listens on this socket only; by itself a store listens on every interface."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = listening.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), **options
    )  # fmt: skip


def register(
    plan: LaunchPlan,
    place: HostPosition,
    stop_signal: Callable[[], signal.Signals | None],
) -> Callable[[], None]:
    """Register ``rdzv_backend=BACKEND`` with torch, for this process.

    torch's agent asks the rendezvous several times a second whether more hosts are waiting. There a stop signal is
    raised as torch's own exception: only the agent can catch it there, and the agent forwards it to its workers and
    waits for them.

    Args:
        stop_signal: returns the stop signal that was received, or None.

    Returns:
        Function that an agent calls after a stop signal, when its workers have ended: torch's agents of other hosts,
        whose workers have ended by themselves, wait 300 s for it otherwise.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    handlers: list[Any] = []

    def make(_: object) -> RendezvousHandler:
        handlers.append(_handler(plan, place, stop_signal))
        return handlers[-1]

    def leave() -> None:
        # the host of the store may be gone without a word
        threads = [threading.Thread(target=handler.leave, daemon=True) for handler in handlers]
        for thread in threads:
            thread.start()
            thread.join(_LEAVE_WITHIN_S)

    rendezvous_handler_registry.register(BACKEND, make)
    return leave


def _handler(
    plan: LaunchPlan,
    place: HostPosition,
    stop_signal: Callable[[], signal.Signals | None],
) -> RendezvousHandler:
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class Rendezvous(RendezvousHandler):
        """One round per attempt, each with its own keys and master port."""

        def __init__(self) -> None:
            self._store: Any = None
            self._workers_store: Any = None
            self._round = 0
            self._every_s = shared_interval(_POLL_S, plan.cluster.nodes)
            self._asked_at = 0.0

        def get_backend(self) -> str:
            return BACKEND

        @property
        def use_agent_store(self) -> bool:
            """Return True: the workers connect to a store of node 0's agent.

            The agent could only choose a port for a store of rank 0, and until rank 0 had imported torch another
            program could take it.
            """
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._wait_for_store()
                self._store = self._open_store()
            self._round += 1
            if not place.node:
                self._workers_store = _serve(socket.create_server((place.address, 0), backlog=BACKLOG))
            self._store.set("round", str(self._round))  # never decreases: no host is a round ahead of the last one
            self._wait_for_all()
            store = PrefixStore(f"round{self._round}", self._store)
            port = self._workers_store.port if self._workers_store is not None else None
            master = RendezvousStoreInfo.build(place.node, store, place.address, port)
            return RendezvousInfo(store, place.node, plan.cluster.nodes, master)

        def _open_store(self) -> Any:
            timeout = timedelta(seconds=_JOIN_WITHIN_S)
            if place.node:
                return _connect(place, timeout=timeout)
            try:
                listening = socket.create_server(_address(place), backlog=BACKLOG)
            except OSError as error:
                raise RendezvousClosedError(
                    f"{place.store}: this host cannot listen there: {os.strerror(error.errno or 0)}. "
                    "Another program has taken the port since it was chosen: start the job again."
                ) from None
            return _serve(listening, timeout=timeout)

        def _stop_if_asked(self) -> None:
            if (number := stop_signal()) is not None:
                raise SignalException("asked to stop", number)

        def _wait_for_store(self) -> None:
            """Wait until the store accepts connections; the store's own waiting cannot be interrupted by a signal."""

            def answers() -> bool:
                self._stop_if_asked()
                try:
                    socket.create_connection(_address(place), timeout=1).close()
                except OSError:
                    return False
                return True

            if place.node and not wait_until(answers, _JOIN_WITHIN_S):
                raise RendezvousClosedError(f"{place.store} does not answer")

        def _wait_for_all(self) -> None:
            """Wait for all hosts by polling, so that a signal or a host that has given up ends the wait."""
            key = f"here{self._round}"

            def complete() -> bool:
                self._stop_if_asked()
                if self._store.check(["over"]):
                    raise RendezvousClosedError(GIVEN_UP)
                return self._store.add(key, 0) >= plan.cluster.nodes

            try:
                self._store.add(key, 1)
                if not wait_until(complete, _JOIN_WITHIN_S, self._every_s):
                    raise RendezvousClosedError(f"{self._store.add(key, 0)} of {plan.cluster.nodes} hosts have arrived")
            except RuntimeError as error:  # node 0 is gone, and the store with it
                raise RendezvousClosedError(str(error)) from error

        def num_nodes_waiting(self) -> int:
            """Return 1 if another host has started the next round because one of its workers failed, else 0."""
            self._stop_if_asked()
            if not plan.cluster.max_restarts or time.monotonic() - self._asked_at < self._every_s:
                return 0
            self._asked_at = time.monotonic()
            try:
                return int(int(self._store.get("round")) > self._round)
            except RuntimeError:  # node 0 is gone; the workers notice that, and so does `launch`
                return 0

        def leave(self) -> None:
            """Take part in the barrier at which torch's agents wait for each other before they end."""
            from torch.distributed.elastic.agent.server import api
            from torch.distributed.elastic.utils import store as _store_util

            store_util: Any = _store_util

            if self._store is not None and self._round and plan.cluster.nodes > 1:
                store = PrefixStore(f"round{self._round}", self._store)
                with suppress(RuntimeError):  # node 0 may have gone, and the store with it
                    key = api._TERMINAL_STATE_SYNC_ID  # pyright: ignore[reportPrivateUsage]
                    store_util._barrier_nonblocking(store, plan.cluster.nodes, key)

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

    return Rendezvous()


class StoreLost(Exception):
    """Node 0 is gone, and its store with it."""


class AgentStore:
    """Texts by key that the agents of a job exchange, in the store of node 0's agent.

    It uses its own connection, because torch's agent uses the same store and neither must wait for the other. A job on
    one host keeps the texts in this process.
    """

    def __init__(self, place: HostPosition, nodes: int) -> None:
        self._place, self._alone = place, nodes == 1
        self._connection: Any = None

    def _store(self) -> Any:
        from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        if self._connection is None:
            self._connection = HashStore() if self._alone else PrefixStore("board", _connect(self._place))
        return self._connection

    def post(self, key: str, text: str) -> None:
        """Set ``key`` to ``text``, replacing an earlier value. Raises StoreLost, as ``read`` does."""
        try:
            self._store().set(key, text)
        except RuntimeError as error:
            raise StoreLost(str(error)) from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the texts of those ``keys`` that exist."""
        try:
            store, keys = self._store(), [*keys]
            # one request for each key takes long in a job of hundreds of hosts
            present = keys if keys and store.check(keys) else [key for key in keys if store.check([key])]
            values: list[bytes] = store.multi_get(present) if present else []
            return {key: value.decode() for key, value in zip(present, values, strict=True)}
        except RuntimeError as error:
            raise StoreLost(str(error)) from error
