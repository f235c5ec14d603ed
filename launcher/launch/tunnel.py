"""TLS tunnel of the agents: with cluster.key, torch's stores listen on node 0's loopback interface only.

Node 0 accepts connections that have the key, and forwards each to the store whose number it sends. On every other host
a listener on the loopback interface, one for each store, forwards to node 0. The agents' own store is number AGENTS;
each start of the workers has one of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing, suppress
from typing import Any, Self

from launcher.errors import SiteError
from launcher.launch.channel import MOST_UNKNOWN, UNKNOWN_FOR_S, Refusals, keep_alive, lacks_key
from launcher.launch.network import BACKLOG
from launcher.plan.launch_plan import HostPosition
from launcher.plan.placement import endpoint
from launcher.tls import client_context, server_context

LOOPBACK = "127.0.0.1"
AGENTS = 0
_HANDSHAKE_WITHIN_S = 10.0
_CLOSE_WITHIN_S = 1.0
_NUMBER_BYTES = 4

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnel(ABC, threading.Thread):
    """One end of the tunnel: a context manager that forwards in a thread of its own.

    Attributes:
        host: address of this host at which it reaches every store.
        place: this host's position; ``store`` is the address at which this host reaches the agents' store.
        store_socket: socket on which the agents' store is to listen here, on node 0; None on other hosts.
    """

    host = LOOPBACK

    def __init__(self, place: HostPosition) -> None:
        super().__init__(daemon=True, name="tunnel")
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._tasks, self._acceptors = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
        self.store_socket = self.listen(AGENTS)
        self.place = dataclasses.replace(place, store=f"{self.host}:{self.port(AGENTS)}")

    @abstractmethod
    def listen(self, number: int) -> socket.socket | None:
        """Return the socket on which the store ``number`` is to listen here, on node 0; None on other hosts.

        The store of the workers that are about to start replaces that of earlier ones.
        """

    @abstractmethod
    def port(self, number: int) -> int:
        """Return the port of ``host`` at which this host reaches the store ``number``."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._over.wait()
        await self._turns()  # forward what a store's client sent last: it is in this host's buffers already
        for tasks in (self._acceptors, self._tasks):
            for task in tasks:
                task.cancel()
            # the acceptors end first: then no task of a connection is new, and each one closes its connection
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._turns()  # for the sockets of closed connections

    async def _turns(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself only has weak references
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen_in(self, coroutine: Coroutine[Any, Any, None], listening: socket.socket) -> asyncio.Task[None]:
        """Start a task that accepts connections of ``listening``."""
        task = self._loop.create_task(coroutine)
        self._acceptors.add(task)
        task.add_done_callback(self._acceptors.discard)
        task.add_done_callback(lambda _: listening.close())  # one that is cancelled at once never runs
        return task

    async def _arrivals(self, listening: socket.socket) -> AsyncIterator[tuple[socket.socket, str]]:
        """Yield every new connection, with the address that it comes from."""
        listening.setblocking(False)
        while True:
            arrived = asyncio.Event()
            self._loop.add_reader(listening, arrived.set)
            try:
                await arrived.wait()
            finally:
                self._loop.remove_reader(listening)
            try:  # not by sock_accept, which loses a connection if it is cancelled just then
                connection, (address, _) = listening.accept()
            except OSError:  # too many open files, or a connection that is gone again
                await asyncio.sleep(0.1)
            else:
                connection.setblocking(False)
                yield connection, address

    async def _streams(self, connection: socket.socket, context: ssl.SSLContext | None = None) -> Streams:
        """Return the streams of an accepted connection, after the TLS handshake if there is a ``context``."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)


class TunnelServer(Tunnel):
    """Node 0's end."""

    def __init__(self, place: HostPosition, key: str, say: Callable[[str], None]) -> None:
        """Listen at ``place.store``. ``say``: shows one line. Raises ConfigError, or SiteError if the port is taken."""
        self._context = server_context(key, "cluster.key")
        try:
            self._listening = socket.create_server(endpoint(place.store), backlog=BACKLOG)
        except OSError as error:
            raise SiteError(
                f"{place.store}: this host cannot listen there: {error.strerror}.\n"
                "  Another program has taken the port since it was chosen: start the job again."
            ) from None
        self._refusals = Refusals(place.store, say)
        self._unknown: dict[asyncio.Task[None], float] = {}  # connections without a key so far -> when they arrived
        self._ports: dict[int, int] = {}
        super().__init__(place)

    def listen(self, number: int) -> socket.socket | None:
        listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        of_agents = {AGENTS: self._ports[AGENTS]} if number else {}
        self._ports = of_agents | {number: listening.getsockname()[1]}
        return listening

    def port(self, number: int) -> int:
        return self._ports[number]

    async def _serve(self) -> None:
        self._listen_in(self._accept(), self._listening)
        await super()._serve()

    async def _accept(self) -> None:
        async for connection, address in self._arrivals(self._listening):
            self._unknown[self._begin(self._admit(connection, address))] = time.monotonic()
            while len(self._unknown) >= MOST_UNKNOWN:
                oldest, arrived = next(iter(self._unknown.items()))
                await asyncio.wait([oldest], timeout=max(0.0, arrived + UNKNOWN_FOR_S - time.monotonic()))
                if self._unknown.pop(oldest, None) is not None:
                    oldest.cancel()

    async def _admit(self, connection: socket.socket, address: str) -> None:
        """Forward a connection to the store whose number it sends, if it has the key."""
        keep_alive(connection)
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(_HANDSHAKE_WITHIN_S):
                remote = await self._streams(connection, self._context)
        except OSError as error:
            if lacks_key(error):
                self._refusals.note(address)
            return
        finally:
            self._unknown.pop(task, None)
        # no number, or that of earlier workers' store: the connection is closed
        with closing(remote[1]), suppress(OSError, EOFError, KeyError):
            async with asyncio.timeout(_HANDSHAKE_WITHIN_S):
                number = int.from_bytes(await remote[0].readexactly(_NUMBER_BYTES))
                local = await asyncio.open_connection(LOOPBACK, self._ports[number])
            await _forward(remote, local)


class TunnelClient(Tunnel):
    """End of a host that is not node 0."""

    def __init__(self, place: HostPosition, key: str) -> None:
        """Forward to ``place.store``. Raises ConfigError."""
        self._context = client_context(key, "cluster.key")
        self._server = endpoint(place.store)
        self._ports: dict[int, int] = {}
        self._of_workers: asyncio.Task[None] | None = None  # listens for the latest workers
        super().__init__(place)

    def listen(self, number: int) -> socket.socket | None:  # noqa: ARG002
        return None

    def port(self, number: int) -> int:
        if number not in self._ports:
            listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
            of_agents = {AGENTS: self._ports[AGENTS]} if number else {}
            self._ports = of_agents | {number: listening.getsockname()[1]}
            self._loop.call_soon_threadsafe(self._replace, listening, number)
        return self._ports[number]

    def _replace(self, listening: socket.socket, number: int) -> None:
        """Accept connections to the store ``number``, and no more to that of earlier workers."""
        if self._of_workers is not None:
            self._of_workers.cancel()
        task = self._listen_in(self._accept(listening, number), listening)
        self._of_workers = task if number else None

    async def _accept(self, listening: socket.socket, number: int) -> None:
        async for connection, _ in self._arrivals(listening):
            self._begin(self._connect(connection, number))

    async def _connect(self, connection: socket.socket, number: int) -> None:
        local = await self._streams(connection)
        # if node 0 cannot be reached, the store's client sees a closed connection, as if it had connected directly
        with closing(local[1]), suppress(OSError):
            async with asyncio.timeout(_HANDSHAKE_WITHIN_S):
                remote = await asyncio.open_connection(*self._server, ssl=self._context)
            keep_alive(remote[1].get_extra_info("socket"))
            remote[1].write(number.to_bytes(_NUMBER_BYTES))
            await _forward(local, remote)


def open_tunnel(place: HostPosition, key: str, say: Callable[[str], None]) -> TunnelServer | TunnelClient:
    """Return this host's end of the tunnel. Arguments: those of TunnelServer."""
    return TunnelClient(place, key) if place.node else TunnelServer(place, key, say)


async def _forward(one: Streams, other: Streams) -> None:
    """Forward in both directions until either side has closed its connection."""
    copies = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        writers = one[1], other[1]
        for writer in writers:
            writer.close()
        try:
            with suppress(OSError):  # lost, or the other side does not answer
                async with asyncio.timeout(_CLOSE_WITHIN_S):
                    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        finally:
            for writer in writers:
                writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
