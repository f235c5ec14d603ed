"""Stores: the first value under a name stays, whole, in a directory and through a server that only holders of the key
reach."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from launcher.cli.serve import launch_store
from launcher.errors import ConfigError
from launcher.exchange.server import StoreServer
from launcher.exchange.store import DirectoryStore, ExchangeStore, HttpsStore, server_address
from launcher.tls import MAKE_KEY, client_context, server_context

_CLIENTS: list[HttpsStore] = []


def make_key(path: Path) -> Path:
    command = [str(path) if word == "FILE" else word for word in MAKE_KEY]
    subprocess.run(command, check=True, capture_output=True)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture
def server(tmp_path: Path, key: Path) -> Iterator[StoreServer]:
    with StoreServer(("127.0.0.1", 0), DirectoryStore(tmp_path / "served"), server_context(key, "--key")) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()
        for store in _CLIENTS:
            store.close()
        _CLIENTS.clear()


def client(server: StoreServer, key: Path) -> HttpsStore:
    store = HttpsStore("127.0.0.1", server.port, client_context(key, "outer.key"))
    _CLIENTS.append(store)
    return store


@pytest.fixture(params=["directory", "server"])
def store(request: pytest.FixtureRequest, tmp_path: Path, key: Path) -> ExchangeStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    return client(request.getfixturevalue("server"), key)


def test_the_first_value_stays(store: ExchangeStore) -> None:
    assert store.get("exchange/1/site0") is None
    assert store.post("exchange/1/site0", b"first")
    assert not store.post("exchange/1/site0", b"second")
    assert store.get("exchange/1/site0") == b"first"
    assert store.get("exchange/1") is None
    assert store.post("empty", b"")
    assert store.get("empty") == b""


def test_one_of_many_that_post_at_once_is_first(store: ExchangeStore) -> None:
    values = [bytes([number]) * 100_000 for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        stored = [*pool.map(lambda value: store.post("decision", value), values)]
    assert sum(stored) == 1
    assert store.get("decision") == values[stored.index(True)]


def test_removed_values_can_be_removed_again(store: ExchangeStore) -> None:
    store.post("exchange/1/site0", b"a")
    store.post("exchange/1/site1", b"b")
    store.remove("exchange/1/site0")
    store.remove("exchange/1/site0")
    assert store.get("exchange/1/site0") is None
    assert store.get("exchange/1/site1") == b"b"
    store.remove("exchange")
    assert store.get("exchange/1/site1") is None


def test_the_names_of_an_exchange(store: ExchangeStore) -> None:
    assert store.names("exchange/1") == set()
    for name in ("site0", "left1", "more/below"):
        store.post(f"exchange/1/{name}", b"")
    store.post("exchange/10", b"")
    assert store.names("exchange/1") == {"site0", "left1", "more"}
    assert store.names("exchange/10") == set()


def test_large_values_pass_whole(server: StoreServer, key: Path) -> None:
    value = bytes(range(256)) * 50_000
    assert client(server, key).post("large", value)
    assert client(server, key).get("large") == value


def test_a_value_whose_transfer_breaks_is_not_there(server: StoreServer, key: Path) -> None:
    context = client_context(key, "outer.key")
    connection = context.wrap_socket(socket.create_connection(("127.0.0.1", server.port)))
    connection.sendall(b"PUT /half HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 5000)
    connection.close()
    store = client(server, key)
    assert store.post("after", b"1")
    assert store.get("half") is None
    assert store.post("half", b"whole")
    assert store.get("half") == b"whole"


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /../key.pem",
        b"GET /.partial/x",
        b"GET /.partial/",
        b"GET /",
        b"PUT /a//b",
        b"DELETE /",
        b"GET /a%2e",
        b"PUT /big",
        b"POST /a",
    ],
)
def test_requests_for_anything_else_are_refused(request_line: bytes, server: StoreServer, key: Path) -> None:
    context = client_context(key, "outer.key")
    length = b"999999999999999" if b"big" in request_line else b"0"
    with context.wrap_socket(socket.create_connection(("127.0.0.1", server.port))) as connection:
        connection.sendall(request_line + b" HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")
        answer = connection.recv(1000)
    assert answer.split()[1] in (b"400", b"501"), answer


def ask(connection: http.client.HTTPSConnection) -> None:
    connection.request("GET", "/a")
    connection.getresponse()


def test_strangers_are_refused_and_others_served(
    server: StoreServer, key: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = client(server, key)
    assert store.post("a", b"1")
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address) for _ in range(20)]
    for garbage in (b"GET /a HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 3000, b""):
        with socket.create_connection(address) as connection:
            connection.sendall(garbage)
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    stranger = http.client.HTTPSConnection(*address, context=without, timeout=20)
    with closing(stranger), pytest.raises((OSError, http.client.HTTPException)):
        ask(stranger)
    with pytest.raises(ConfigError, match=r"outer\.key: the server at 127\.0\.0\.1:\d+ has another key"):
        client(server, make_key(tmp_path / "other.pem")).get("a")
    assert store.get("a") == b"1"
    assert client(server, key).get("a") == b"1"
    for each in silent:
        each.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, "one line in ten seconds"
    assert lines[0].startswith("Refused a connection from 127.0.0.1")


def test_a_client_refuses_a_server_with_another_key(tmp_path: Path) -> None:
    other = StoreServer(
        ("127.0.0.1", 0), DirectoryStore(tmp_path / "o"), server_context(make_key(tmp_path / "k.pem"), "--key")
    )
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        with pytest.raises(ConfigError, match="has another key"):
            client(other, make_key(tmp_path / "mine.pem")).post("secret", b"1")
    finally:
        other.shutdown()
        other.server_close()
    assert not (tmp_path / "o" / "secret").exists()


def test_a_full_disk_is_an_error_of_the_store(server: StoreServer, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server.store, "keep", full)
    with pytest.raises(OSError, match="No space left on device"):
        client(server, key).post("a", b"1")
    monkeypatch.undo()
    assert client(server, key).post("a", b"1")


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    partial = DirectoryStore(tmp_path).new_partial()
    new = partial.with_name("new")
    for file in (partial, new):
        file.write_bytes(b"half of a value")
    os.utime(partial, (0, 0))
    DirectoryStore(tmp_path)
    assert not partial.exists()
    assert new.exists(), "a site may be writing it"


def test_a_directory_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match="they need hard links"):
        DirectoryStore(tmp_path)
    assert [*tmp_path.rglob("*.*")] == [tmp_path / ".partial"]


@pytest.mark.parametrize(
    ("store", "found"),
    [("/shared/dir", None), ("dir", None), ("https://host:1", ("host", 1)), ("https://[::1]:1", ("::1", 1))],
)
def test_places_of_a_store(store: str, found: tuple[str, int] | None) -> None:
    assert server_address(store) == found


@pytest.mark.parametrize("store", ["http://host:1", "https://host", "https://host:x", "https://host:1/a", "tcp://h:1"])
def test_addresses_that_are_none(store: str) -> None:
    with pytest.raises(ConfigError, match="https://HOST:PORT"):
        server_address(store)


def test_a_directory_that_cannot_be_served_is_named(tmp_path: Path, key: Path) -> None:
    """It was taken for a mistake in --listen."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"DIRECTORY=.*file") as raised:
        launch_store([str(tmp_path / "file"), "--key", str(key), "--listen", "127.0.0.1:0"])
    assert "--listen" not in str(raised.value)
