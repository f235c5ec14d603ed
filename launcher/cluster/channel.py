"""JSON objects between two hosts, a line each, over one TCP connection; and the door where such connections come in."""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, cast

Message = dict[str, Any]

PROTOCOL = "launcher 1"
# A host that has not answered the kernel's probes for this long is lost: its power is off, or the link is down. One
# whose processes were killed is known at once.
LOST_AFTER_S = 30
_PROBE_AFTER_S, _PROBE_EVERY_S = 10, 5
_SEND_WITHIN_S = 10
_LONGEST_LINE = 4 * 2**20
_INTRODUCTION_WITHIN_S = 10


class Channel:
    """One connection. Nothing raises: a connection that is gone, or carries something else, is no longer ``open``.
    ``silent``: it is gone because the other host did not answer any more."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer = connection, b""
        self._messages: list[Message] = []
        self.open, self.silent = True, False
        self.opened = time.monotonic()
        self.peer = str(connection.getpeername()[0])
        connection.settimeout(_SEND_WITHIN_S)
        tcp = socket.IPPROTO_TCP
        # the kernel asks, not this process: a terminal that is stopped with Ctrl-S or Ctrl-Z loses no host
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        connection.setsockopt(tcp, socket.TCP_KEEPCNT, (LOST_AFTER_S - _PROBE_AFTER_S) // _PROBE_EVERY_S)
        connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)  # the same for what was sent

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
        """What has come, without waiting."""
        self._read()
        messages, self._messages = self._messages, []
        return messages

    def next(self, seconds: float) -> Message | None:
        """The next message; None when none came in time, or the connection is gone."""
        end = time.monotonic() + seconds
        while not self._messages and self.open and time.monotonic() < end:
            wait([self], end - time.monotonic())
            self._read()
        return self._messages.pop(0) if self._messages else None

    def _read(self) -> None:
        # looked at first, because the time limit of sending holds for receiving too
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
    """A listening socket, and those who have come in without saying yet who they are."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Raises OSError: another program listens there."""
        self._listener = socket.create_server(address)
        self._listener.setblocking(False)
        self._strangers: list[Channel] = []

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def sources(self) -> list[Any]:
        """What to wait for, with select."""
        return [self._listener, *self._strangers]

    def arrivals(self) -> list[tuple[Channel, Message]]:
        """Who has introduced itself as a `launch`, with what it said. Anything else is shown out, and cannot keep a
        place: port scanners, browsers, silence."""
        try:
            while True:
                self._strangers.append(Channel(self._listener.accept()[0]))
        except OSError:  # nobody else is waiting, or who did is gone again
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
    """Until one of ``sources`` has something, or ``seconds`` are over; whether one has."""
    ready, _, _ = select.select([source for source in sources if source.fileno() >= 0], [], [], max(0.0, seconds))
    return bool(ready)


def _unanswered(error: OSError) -> bool:
    """Whether the other host did not answer, rather than having closed the connection."""
    lost = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return isinstance(error, TimeoutError) or error.errno in lost
