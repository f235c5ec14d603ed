"""`launch store`: the server through which sites of outer steps exchange."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

from launcher.cli.names import Parser
from launcher.errors import EXIT_DONE, ConfigError, UserError
from launcher.exchange.server import StoreServer
from launcher.exchange.store import DirectoryStore
from launcher.tls import MAKE_KEY, server_context

_DEFAULT_LISTEN = "0.0.0.0:29800"
_DOES = """\
Serve the store through which sites exchange that are jobs of their own (outer.store): docs/guides/outer.md. It can be
stopped and started again at any time: what it keeps is in DIRECTORY, and the sites wait. Only programs that have the
same key file can connect.
"""


def launch_store(arguments: list[str]) -> int:
    """Serve a directory until SIGINT or SIGTERM."""
    parser = Parser(prog="launch store", description=_DOES, allow_abbrev=False)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="where it keeps what the sites send")
    parser.add_argument(
        "--key", type=Path, required=True, help="private key and certificate: the same file as outer.key"
    )
    parser.add_argument("--make-key", action="store_true", help="make this file first, with openssl")
    parser.add_argument("--listen", default=_DEFAULT_LISTEN, help=f"HOST:PORT (default: {_DEFAULT_LISTEN})")
    options = parser.parse_args(arguments)
    if options.make_key:
        make_key(options.key)
    address = _address(options.listen)
    context = server_context(options.key, "--key")
    try:
        store = DirectoryStore(options.directory)
    except OSError as error:
        raise ConfigError("DIRECTORY", options.directory, f"{error.strerror}.", "Choose another one.") from None
    try:
        server = StoreServer(address, store, context)
    except OSError as error:
        raise ConfigError("--listen", options.listen, f"{error.strerror}.", "Choose another HOST:PORT.") from None

    def end(*_: object) -> None:
        threading.Thread(target=server.shutdown).start()  # it waits for the loop that this thread runs

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    shown = f"{address[0]}:{server.port}"
    print(f"Serving {options.directory.absolute()} at {shown}. Ctrl-C ends it; nothing is lost.", flush=True)
    with server:
        server.serve_forever()
    return EXIT_DONE


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("--listen", listen, "must be HOST:PORT, such as 0.0.0.0:29800.")
    return host.strip("[]"), int(port)


def make_key(path: Path) -> None:
    """Make a key file (``launcher.tls``) that only its owner can read."""
    if path.exists():
        raise ConfigError("--make-key", path, "exists already.", "Leave --make-key out to use it.")
    command = [str(path.absolute()) if word == "FILE" else word for word in MAKE_KEY]
    mask = os.umask(0o077)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"--make-key: there is no openssl here.\n  Make it elsewhere: {' '.join(MAKE_KEY)}") from None
    finally:
        os.umask(mask)
    if done.returncode:
        raise UserError(f"--make-key: openssl failed: {done.stderr.strip()[-300:]}")
