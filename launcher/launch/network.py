"""Network interfaces and addresses of this host, and JSON messages between hosts."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import psutil

from launcher.errors import SiteError
from launcher.plan.placement import endpoint

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    name: str
    address: str

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.")


@dataclass(frozen=True)
class Route:
    """Route to the other hosts.

    Args:
        rendezvous: address and port where the hosts meet.
        here: True if this host has that address.
        interface: interface of this host towards the others.
    """

    rendezvous: tuple[str, int]
    here: bool
    interface: Interface

    @property
    def shown(self) -> str:
        return f"{self.rendezvous[0]}:{self.rendezvous[1]}"


def interfaces() -> list[Interface]:
    """Return every interface of this host with an IPv4 address, one entry per address."""
    # an alias such as eth0:1 is an address of eth0
    return [
        Interface(name.partition(":")[0], entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def find_route(rendezvous: str, wanted: str | None) -> Route:
    """Return the route of this host to ``rendezvous``. Nothing is sent, except to resolve a name.

    Args:
        rendezvous: HOST:PORT where the hosts meet.
        wanted: interface named by the user, or None.

    Raises:
        SiteError: The name has no address, or one that no other host reaches; no interface leads there; or ``wanted``
            does not exist.
    """
    host, port = endpoint(rendezvous)
    present = interfaces()
    addresses = _resolve(rendezvous, host, present)
    own = next((i for address in addresses for i in present if i.address == address), None)
    if own is not None:
        return Route((own.address, port), True, _wanted(wanted, present) or own)
    source = _source_address(rendezvous, addresses[0], port, present)
    towards = next((i for i in present if i.address == source), None)
    chosen = _wanted(wanted, present) or towards
    if chosen is None:
        raise SiteError(f"cluster.rendezvous={rendezvous}: no interface of this host has {source}, its address there.")
    return Route((addresses[0], port), False, chosen)


def socket_names(route: Route, wanted: str | None) -> dict[str, str]:
    """Return the environment variables that select the interface for gloo and NCCL, as defaults.

    Raises:
        SiteError: cluster.interface contradicts the environment.
    """
    for name in (GLOO, NCCL):
        said = os.environ.get(name)
        if wanted is not None and said is not None and said.lstrip("=") != wanted:
            raise SiteError(
                f"cluster.interface={wanted}: the environment says {name}={said}.\n  Unset {name}, or leave out "
                "cluster.interface."
            )
    # NCCL treats a bare name as a prefix: eth0 would match eth0.100 too
    return {GLOO: route.interface.name, NCCL: f"={route.interface.name}"}


def _resolve(rendezvous: str, host: str, present: list[Interface]) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: no IPv4 address is known for {host} "
            f"({getattr(error, 'strerror', None) or error}).\n  Use the first host's address, or a name that every "
            "host can look up."
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    reachable = [address for address in addresses if not address.startswith(("127.", "0."))]
    if not reachable:
        is_ = "" if addresses[0] == host else f"{host} is {addresses[0]} here; "
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: {is_}no other host reaches that.\n"
            f"  Use an address of the first host. This host has: {_shown(present)}."
        )
    return reachable


def _source_address(rendezvous: str, address: str, port: int, present: list[Interface]) -> str:
    """Return this host's address on the route to ``address``; a datagram socket finds it without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            asker.connect((address, port))
        except OSError as error:
            raise SiteError(
                f"cluster.rendezvous={rendezvous}: this host has no way to {address}: {error.strerror}.\n"
                f"  Use an address of the first host that every host reaches. This host has: {_shown(present)}."
            ) from None
        return str(asker.getsockname()[0])


def _wanted(name: str | None, present: list[Interface]) -> Interface | None:
    if name is None:
        return None
    found = next((i for i in present if i.name == name and not i.loopback), None)
    if found is None:
        exists = name in {known for _, known in socket.if_nameindex()}
        problem = "has no IPv4 address that others reach" if exists else "is no interface of this host"
        raise SiteError(f"cluster.interface={name}: {problem}.\n  This host has: {_shown(present)}.")
    return found


def free_port(address: str) -> int:
    """Return a port of this host's ``address`` on which nothing listens."""
    with socket.create_server((address, 0)) as probe:
        return probe.getsockname()[1]


def _shown(present: list[Interface]) -> str:
    return ", ".join(f"{i.address} ({i.name})" for i in present if not i.loopback) or "no address but loopback"


def require_reach(address: str, port: int, whose: str, seconds: float = 5.0) -> None:
    """Check that this host can connect to ``address``; a refused connection passes, as it shows that the host is there.

    Args:
        whose: description of the host that announced ``address`` as its own.

    Raises:
        SiteError: The host cannot be reached, or ``address`` belongs to this host too.
    """
    problem = (
        "it is an address of this host too"
        if any(i.address == address and not i.loopback for i in interfaces())
        else ""
    )
    if not problem:
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            problem = error.strerror or str(error)
    if problem:
        raise SiteError(
            f"cluster.interface: {socket.gethostname()} does not reach {address}, where {whose} is to be reached: "
            f"{problem}.\n  Set cluster.interface there to the one that leads to the other hosts."
        )


Message = dict[str, Any]

PROTOCOL = "launcher 1"
# Seconds without an answer to the kernel's probes after which a host is lost: its power is off, or the link is down. If
# only its processes were killed, that is noticed at once.
LOST_AFTER_S = 30
_PROBE_AFTER_S, _PROBE_EVERY_S = 10, 5
_SEND_WITHIN_S = 10
_LONGEST_LINE = 4 * 2**20
_INTRODUCTION_WITHIN_S = 10


class Channel:
    """Connection that carries JSON messages.

    No method raises: ``open`` becomes false when the connection is lost or carries anything else. ``silent`` is true
    if it was lost because the other host stopped answering.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, b""
        self._messages: list[Message] = []
        self.open, self.silent = True, False
        self.opened = time.monotonic()
        self.peer = str(connection.getpeername()[0])
        connection.settimeout(_SEND_WITHIN_S)
        tcp = socket.IPPROTO_TCP
        # the kernel sends the probes, so a terminal that is stopped with Ctrl-S or Ctrl-Z does not lose a host
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, (LOST_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)  # for unacknowledged data

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        if not self.open:
            return
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.silent = _unanswered(error)
            self.close()

    def receive(self) -> list[Message]:
        """Return the messages received so far, without waiting."""
        self._read()
        messages, self._messages = self._messages, []
        return messages

    def next(self, seconds: float) -> Message | None:
        """Return the next message; None if none came within ``seconds`` or the connection is gone."""
        end = time.monotonic() + seconds
        while not self._messages and self.open and time.monotonic() < end:
            wait([self], end - time.monotonic())
            self._read()
        return self._messages.pop(0) if self._messages else None

    def _read(self) -> None:
        # poll first: the socket's time limit is meant for sending, but recv would wait for it too
        if not self.open or not wait([self], 0):
            return
        try:
            new = self._socket.recv(2**16)
        except OSError as error:
            self.silent = _unanswered(error)
            new = b""
        *lines, self._buffer = (self._buffer + new).split(b"\n")
        for line in lines:
            message = _parse(line)
            if message is None:
                self.close()
                return
            self._messages.append(message)
        if not new or len(self._buffer) > _LONGEST_LINE:
            self.close()

    def close(self) -> None:
        self.open = False
        self._socket.close()


class Door:
    """Listening socket with the connections that have not introduced themselves yet."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Listen at ``address``. Raises OSError if another program listens there."""
        self._listener = socket.create_server(address)
        self._listener.setblocking(False)
        self._strangers: list[Channel] = []

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def sources(self) -> list[Any]:
        """Return the sockets to pass to ``wait``."""
        return [self._listener, *self._strangers]

    def arrivals(self) -> list[tuple[Channel, Message]]:
        """Return new connections from a `launch`, each with its first message.

        Anything else (port scanners, browsers, silent connections) is closed and takes no place.
        """
        try:
            while True:
                self._strangers.append(Channel(self._listener.accept()[0]))
        except OSError:  # no further connection is waiting, or it is gone again
            pass
        arrived: list[tuple[Channel, Message]] = []
        staying: list[Channel] = []
        for channel in self._strangers:
            said = channel.receive()
            if said and said[0].get("launch") == PROTOCOL and channel.open:
                channel.send(launch=PROTOCOL)
                arrived.append((channel, said[0]))
            elif said or time.monotonic() - channel.opened > _INTRODUCTION_WITHIN_S:
                channel.close()
            elif channel.open:
                staying.append(channel)
        self._strangers = staying
        return arrived

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.close()
        self._listener.close()


def _parse(line: bytes) -> Message | None:
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(Message, message) if isinstance(message, dict) else None


def wait(sources: Sequence[Any], seconds: float) -> bool:
    """Wait until one of ``sources`` is readable, for at most ``seconds``. Return True if one is."""
    ready, _, _ = select.select([source for source in sources if source.fileno() >= 0], [], [], max(0.0, seconds))
    return bool(ready)


def _unanswered(error: OSError) -> bool:
    """Return True if the other host did not answer, False if it closed the connection."""
    lost = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return isinstance(error, TimeoutError) or error.errno in lost
