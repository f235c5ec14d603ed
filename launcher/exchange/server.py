"""Server of a store (`launch store`): HTTP over mutual TLS, in front of a directory.

Only holders of the shared key complete the handshake. Names and lengths are checked before anything is read, and what
arrives incomplete is dropped.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from launcher.exchange.store import IDLE_S, MAX_VALUE_GIB, DirectoryStore, valid_name

_HANDSHAKE_S = 10.0
_MOST_HANDSHAKES = 64  # at a time; further connections wait in the listen queue
_CHUNK = 1 << 20
_REFUSAL_EVERY_S = 10.0  # at most one line about refused connections in this time


class StoreServer(ThreadingHTTPServer):
    """HTTPS server of a directory.

    Args:
        address: (host, port) to listen at.
        store: what it serves.
        context: of the server side; it requires the clients' certificates.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], store: DirectoryStore, context: ssl.SSLContext) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.store, self._context = store, context
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._refused, self._reported_at = 0, -_REFUSAL_EVERY_S
        super().__init__(address, _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._handshakes.acquire()
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, in a thread of its own."""
        try:
            try:
                request.settimeout(_HANDSHAKE_S)
                connection = self._context.wrap_socket(request, server_side=True)
            finally:
                self._handshakes.release()
        except OSError as error:  # ssl.SSLError is one
            self._refuse(client_address[0], error)
            return
        with connection:
            connection.settimeout(IDLE_S * 5)
            self.RequestHandlerClass(connection, client_address, self)

    def _refuse(self, address: str, error: OSError) -> None:
        self._refused += 1
        if time.monotonic() - self._reported_at < _REFUSAL_EVERY_S:
            return
        self._reported_at = time.monotonic()
        number = "" if self._refused == 1 else f" (and {self._refused - 1} before it)"
        reason = getattr(error, "reason", None) or error
        print(f"Refused a connection from {address}{number}: {reason}", file=sys.stderr, flush=True)
        self._refused = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks concerns its client only, who repeats the request."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a small value would wait for a round trip after its headers

    @property
    def _store(self) -> DirectoryStore:
        assert isinstance(self.server, StoreServer)
        return self.server.store

    def do_HEAD(self) -> None:
        self._send_value(body=False)

    def do_GET(self) -> None:
        above = self.path.removeprefix("/").removesuffix("/")
        if self.path.endswith("/") and valid_name(above):
            self._answer(HTTPStatus.OK, "\n".join(self._store.names(above)))
        else:
            self._send_value(body=True)

    def do_PUT(self) -> None:
        name, length = self._name(), self.headers.get("Content-Length", "")
        if name is None:
            return
        if not length.isascii() or not length.isdigit() or int(length) > MAX_VALUE_GIB << 30:
            self._answer(HTTPStatus.BAD_REQUEST, "Content-Length is missing or too large", close=True)
            return
        store, rest = self._store, int(length)
        partial = store.new_partial()
        try:
            with partial.open("wb") as file:
                while rest:
                    part = self.rfile.read(min(rest, _CHUNK))
                    if not part:
                        self.close_connection = True
                        return
                    file.write(part)
                    rest -= len(part)
            stored = store.keep(partial, name)
        except OSError as error:
            if isinstance(error, ssl.SSLError | ConnectionError | TimeoutError):
                raise
            self._answer(HTTPStatus.INSUFFICIENT_STORAGE, f"{error.strerror}", close=True)
            return
        finally:
            partial.unlink(missing_ok=True)
        self._answer(HTTPStatus.CREATED if stored else HTTPStatus.CONFLICT)

    def do_DELETE(self) -> None:
        name = self._name()
        if name is not None:
            self._store.remove(name)
            self._answer(HTTPStatus.OK)

    def _name(self) -> str | None:
        """Return the value's name; None: it is not one, which was answered."""
        name = self.path.removeprefix("/")
        if valid_name(name):
            return name
        self._answer(HTTPStatus.BAD_REQUEST, "this is not the name of a value", close=True)
        return None

    def _send_value(self, *, body: bool) -> None:
        name = self._name()
        if name is None:
            return
        path = self._store.path(name)
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._answer(HTTPStatus.NOT_FOUND)
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            if body:
                shutil.copyfileobj(file, self.wfile, _CHUNK)

    def _answer(self, status: HTTPStatus, text: str = "", *, close: bool = False) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if close:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class names it)
        """Requests are not logged: there are several of each exchange."""
