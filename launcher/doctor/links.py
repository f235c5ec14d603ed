"""From host to host: does a connection to any port come about, how long is the way, how far are the clocks apart?"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_WITHIN_S = 5.0
_ASKED = 8
_AT_ONCE = 16
_TIME = struct.Struct("!d")


class _Clock(socketserver.BaseRequestHandler):
    """Says what time it is here, once for each byte that it gets."""

    def handle(self) -> None:
        self.request.settimeout(_WITHIN_S)
        while self.request.recv(1):
            self.request.sendall(_TIME.pack(time.time()))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that has gone is the caller's to tell of."""


@contextmanager
def listening(address: str) -> Generator[int]:
    """A free port of ``address`` on which this host's clock answers.

    Raises:
        OSError: none can be opened.
    """
    with _Server((address, 0), _Clock) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def reach_all(places: dict[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Call each of the hosts, as ``reach`` does, several at once; ``node`` says which one it was."""
    if not places:
        return []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        calls = {node: pool.submit(reach, address, port) for node, (address, port) in places.items()}
    return [{"node": node} | call.result() for node, call in calls.items()]


def reach(address: str, port: int) -> dict[str, Any]:
    """``problem``: why there is no connection; empty where there is. ``rtt_s``: of the fastest way there and back,
    ``offset_s``: what the clock there is ahead of this one, by that same exchange: half the way is the same each way.
    """
    best: tuple[float, float] | None = None
    try:
        with socket.create_connection((address, port), timeout=_WITHIN_S) as there:
            for _ in range(_ASKED):
                before, begun = time.time(), time.monotonic()
                there.sendall(b"?")
                said = _TIME.unpack(_receive(there, _TIME.size))[0]
                took = time.monotonic() - begun
                if best is None or took < best[0]:
                    best = (took, said - (before + took / 2))
    except OSError as error:
        return {"address": address, "problem": error.strerror or str(error) or type(error).__name__}
    assert best is not None
    return {"address": address, "problem": "", "rtt_s": best[0], "offset_s": best[1]}


def _receive(there: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = there.recv(size - len(got))
        if not part:
            raise ConnectionError("closed by the other host")
        got += part
    return got
