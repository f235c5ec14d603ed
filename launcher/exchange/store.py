"""Store that sites exchange values through: a directory that all of them see, or an HTTPS server that keeps one.

A value has a name such as exchange/00000050.0/site1 and never changes: the first one posted under a name stays. That
is all that sites need to agree on anything, and a site that repeats its steps after a restart changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import shutil
import ssl
import time
import uuid
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from launcher.errors import ConfigError, SiteError
from launcher.quantities import bytes_text
from launcher.tls import is_refusal

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_PARTIAL = ".partial"  # directory of values that are being written; no name starts with a dot
# seconds after which a connection that transfers nothing counts as broken
IDLE_S = 60.0
MAX_VALUE_GIB = 64
_STATUSES = (http.client.OK, http.client.CREATED, http.client.NOT_FOUND, http.client.CONFLICT)
_SMALL = 1 << 14  # bytes of the largest value that is sent without a HEAD before: asking takes as long
_KEEPS_PARTIAL_S = 3600.0


class ExchangeStore(Protocol):
    """Values by name. All methods raise OSError if the store cannot be reached; they can be repeated then."""

    def post(self, name: str, value: bytes) -> bool:
        """Store a value, unless there is one under this name already; return whether it was stored."""
        ...

    def get(self, name: str) -> bytes | None:
        """Return a value; None: there is none."""
        ...

    def names(self, above: str) -> set[str]:
        """Return the last component of each name directly below ``above``."""
        ...

    def remove(self, name: str) -> None:
        """Remove a value, or all values whose names start with ``name/``."""
        ...

    def close(self) -> None:
        """Release what is kept between two calls."""
        ...


def valid_name(name: str) -> bool:
    """Return whether a value can have this name. No such name leads out of the store."""
    return len(name) <= 200 and _NAME.fullmatch(name) is not None


class DirectoryStore:
    """Store in a directory. Values are durable, and appear whole or not at all."""

    def __init__(self, root: Path) -> None:
        """Make the directory. Raises OSError if it cannot be written, or has no hard links."""
        self.root = root
        (root / _PARTIAL).mkdir(parents=True, exist_ok=True)
        file, link = self.new_partial(), self.new_partial()
        try:
            file.touch()
            os.link(file, link)
        except OSError as error:
            raise OSError(
                error.errno, f"no values can be kept there ({error.strerror}): they need hard links"
            ) from None
        finally:
            file.unlink(missing_ok=True)
            link.unlink(missing_ok=True)
        self._remove_partial()

    def path(self, name: str) -> Path:
        """Return the file of a value."""
        if not valid_name(name):
            raise ValueError(f"{name!r} cannot name a value.")
        return self.root / name

    def new_partial(self) -> Path:
        """Return a new file for a value that is being written."""
        return self.root / _PARTIAL / uuid.uuid4().hex

    def _remove_partial(self) -> None:
        """Remove partial files that nobody has written to for an hour: their writer was killed."""
        for file in (self.root / _PARTIAL).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _KEEPS_PARTIAL_S:
                    file.unlink()

    def post(self, name: str, value: bytes) -> bool:
        if self.path(name).exists():
            return False
        partial = self.new_partial()
        try:
            partial.write_bytes(value)
            return self.keep(partial, name)
        finally:
            partial.unlink(missing_ok=True)

    def keep(self, partial: Path, name: str) -> bool:
        """Store the content of a file, unless there is a value under this name; return whether it was stored."""
        path = self.path(name)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(partial, path)  # fails if the name is taken, in one step
        except FileExistsError:
            return False
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return True

    def get(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def names(self, above: str) -> set[str]:
        try:
            return {path.name for path in self.path(above).iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # another site may remove it at the same time
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        pass


class HttpsStore:
    """Store of a server (``launch store``). Connections are kept between requests, also of several threads."""

    def __init__(self, address: str, port: int, context: ssl.SSLContext) -> None:
        self._connect = functools.partial(
            http.client.HTTPSConnection, address, port, timeout=IDLE_S, context=context
        )  # fmt: skip
        self._idle: list[http.client.HTTPSConnection] = []

    def post(self, name: str, value: bytes) -> bool:
        if len(value) > MAX_VALUE_GIB << 30:
            raise SiteError(
                f"outer.store: {name} has {bytes_text(len(value))}, and a server keeps values of {MAX_VALUE_GIB} GiB.\n"
                "  Use more outer.fragments, or outer.compress; or a directory."
            )
        if len(value) > _SMALL and self._request("HEAD", name)[0] == http.client.OK:
            return False  # without sending it
        return self._request("PUT", name, value)[0] == http.client.CREATED

    def get(self, name: str) -> bytes | None:
        status, value = self._request("GET", name)
        return value if status == http.client.OK else None

    def names(self, above: str) -> set[str]:
        return {*self._request("GET", f"{above}/")[1].decode().split()}

    def remove(self, name: str) -> None:
        self._request("DELETE", name)

    def close(self) -> None:
        """Close the connections. The next request opens one again."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self._idle.pop().close()

    def _request(self, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and body of a request.

        Raises:
            ConfigError: the server has another key.
            OSError: the server cannot be reached, or it cannot keep the value.
            SiteError: it refuses the request, such as a value that is too large.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        done = False
        try:
            connection.request(method, f"/{name}", body)
            answer = connection.getresponse()
            value = answer.read()
            done = True
        except http.client.HTTPException as error:
            raise ConnectionError(repr(error)) from None
        except OSError as error:
            if not is_refusal(error):
                raise
            raise ConfigError(
                "outer.key", None, f"the server at {connection.host}:{connection.port} has another key.",
                "Copy the same file to all sites and to the server.",
            ) from None  # fmt: skip
        finally:
            if done:
                self._idle.append(connection)
            else:
                connection.close()
                self.close()  # the server may have closed all of them
        if answer.status not in _STATUSES:
            text = f"the server answered {answer.status}: {value[:200].decode(errors='replace')}"
            if answer.status < http.client.INTERNAL_SERVER_ERROR:  # repeating the request would change nothing
                raise SiteError(f"outer.store=https://{connection.host}:{connection.port}: {text}.")
            raise OSError(text)
        return answer.status, value


def server_address(store: str) -> tuple[str, int] | None:
    """Return host and port of ``outer.store``; None: it is a directory.

    Raises:
        ConfigError: it is neither.
    """
    if "://" not in store:
        return None
    parts = urlsplit(store)
    try:
        port = parts.port
    except ValueError:
        port = None
    more = "@" in parts.netloc or parts.path.strip("/") or parts.query
    if parts.scheme != "https" or not parts.hostname or not port or more:
        raise ConfigError(
            "outer.store", store, "must be a directory that all sites see, or https://HOST:PORT.",
            "Start a server with `launch store DIRECTORY --listen HOST:PORT --key FILE`.",
        )  # fmt: skip
    return parts.hostname, port
