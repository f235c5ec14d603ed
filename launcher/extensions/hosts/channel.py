"""Connections between the `launch` processes of several hosts, which carry JSON messages."""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from launcher.rundir.files import object_from_json

Message = dict[str, Any]

PROTOCOL = "launcher 1"
# Seconds without an answer to the kernel's probes after which a host is lost: its power is off, or the link is down. If
# only its processes were killed, that is noticed at once.
LOST_AFTER_S = 30
_PROBE_AFTER_S, _PROBE_EVERY_S = 10, 5
_SEND_WITHIN_S = 10
_LONGEST_LINE = 4 * 2**20
_INTRODUCTION_WITHIN_S = 10
# if so many connections have not introduced themselves, the oldest is closed once it had this many seconds for it
MOST_UNKNOWN, UNKNOWN_FOR_S = 128, 2.0


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close the connection after LOST_AFTER_S without an answer from the other host."""
    tcp = socket.IPPROTO_TCP
    # the kernel sends the probes, so a terminal that is stopped with Ctrl-S or Ctrl-Z does not lose a host
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, (LOST_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)  # for unacknowledged data


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
        keep_alive(connection)

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
        if not self.open:
            return
        try:
            self._socket.settimeout(0)  # its time limit is meant for sending
            new = self._socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError as error:
            self.silent = _unanswered(error)
            new = b""
        finally:
            self._socket.settimeout(_SEND_WITHIN_S)
        *lines, self._buffer = (self._buffer + new).split(b"\n")
        for line in lines:
            message = object_from_json(line)
            if message is None:
                self.close()
                return
            self._messages.append(message)
        if not new or len(self._buffer) > _LONGEST_LINE:
            self.close()

    def close(self) -> None:
        self.open = False
        self._socket.close()


class Listener:
    """Listening socket with the connections that have not introduced themselves yet."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Listen at ``address``. Raises OSError if another program listens there."""
        self._socket = socket.create_server(address)
        self._socket.setblocking(False)
        self._unknown: list[Channel] = []

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def sources(self) -> list[Any]:
        """Return the sockets to pass to ``wait``."""
        return [self._socket, *self._unknown] if self._has_room() else [*self._unknown]

    def _has_room(self) -> bool:
        """Return True if one more connection may introduce itself."""
        if len(self._unknown) >= MOST_UNKNOWN and time.monotonic() - self._unknown[0].opened > UNKNOWN_FOR_S:
            self._unknown.pop(0).close()
        return len(self._unknown) < MOST_UNKNOWN

    def arrivals(self) -> list[tuple[Channel, Message]]:
        """Return new connections from a `launch`, each with its first message.

        Anything else (port scanners, browsers, silent connections) is closed and counts as no host.
        """
        with suppress(OSError):  # there is none, or it is gone again
            while self._has_room():
                self._unknown.append(Channel(self._socket.accept()[0]))
        arrived: list[tuple[Channel, Message]] = []
        for channel in self._unknown.copy():
            messages = channel.receive()
            if messages and messages[0].get("launch") == PROTOCOL and channel.open:
                channel.send(launch=PROTOCOL)
                arrived.append((channel, messages[0]))
            elif messages or time.monotonic() - channel.opened > _INTRODUCTION_WITHIN_S:
                channel.close()
            elif channel.open:
                continue
            self._unknown.remove(channel)
        return arrived

    def close(self) -> None:
        for connection in (self._socket, *self._unknown):
            connection.close()


def wait(sources: Sequence[Any], seconds: float) -> bool:
    """Wait until one of ``sources`` is readable, for at most ``seconds``. Return True if one is."""
    ready, _, _ = select.select([source for source in sources if source.fileno() >= 0], [], [], max(0.0, seconds))
    return bool(ready)


def _unanswered(error: OSError) -> bool:
    """Return True if the other host did not answer, False if it closed the connection."""
    lost = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return isinstance(error, TimeoutError) or error.errno in lost
