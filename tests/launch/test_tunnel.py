"""The tunnel to torch's stores: who gets through it, over loopback sockets."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from launcher.launch import tunnel
from launcher.launch.rendezvous import AgentStore, StoreLost, _handler  # pyright: ignore[reportPrivateUsage]
from launcher.launch.tunnel import Tunnel, open_tunnel
from launcher.plan.launch_plan import HostPosition
from launcher.tls import client_context
from tests.helpers import key_file, make_plan, patience
from tests.infra.meeting import TWO, free_port, wait_until


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("key") / "key.pem")


def place(port: int, node: int) -> HostPosition:
    return HostPosition(node=node, address="127.0.0.1", interface="lo", store=f"127.0.0.1:{port}", shared=False)


@contextmanager
def ends(key: Path, said: list[str] | None = None) -> Iterator[tuple[int, Tunnel, Tunnel]]:
    """The port of node 0's end, and both ends."""
    port = free_port()
    with (
        open_tunnel(place(port, 0), str(key), (said if said is not None else []).append) as server,
        open_tunnel(place(port, 1), str(key), print) as client,
    ):
        yield port, server, client


def store_of(server: Tunnel) -> Any:
    assert server.store_socket is not None
    host, port = server.store_socket.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.store_socket.detach())


def answer(port: int, data: bytes) -> bytes:
    """Return the bytes that ``port`` sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as connection:
        try:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except ConnectionResetError:
            return b""


def test_two_agents_meet_and_each_start_of_the_workers_has_a_store_of_its_own(key: Path) -> None:
    plan = make_plan(*TWO)
    with ends(key) as (port, server, client):
        handlers = [_handler(plan, place(port, node), lambda: None, end) for node, end in ((0, server), (1, client))]
        assert all(handler.use_agent_store for handler in handlers)
        for attempt in ("0", "1"):
            infos: dict[int, Any] = {}

            def join(node: int, infos: dict[int, Any] = infos) -> None:
                infos[node] = handlers[node].next_rendezvous()

            threads = [threading.Thread(target=join, args=(node,), daemon=True) for node in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(patience(30))
            masters = [infos[node].bootstrap_store_info for node in (0, 1)]
            assert [master.master_addr for master in masters] == ["127.0.0.1", "127.0.0.1"]
            here, there = (TCPStore("127.0.0.1", master.master_port, wait_for_workers=False) for master in masters)
            assert not there.check(["attempt"]), "nothing of the earlier start is left"
            here.set("attempt", attempt)
            assert there.get("attempt") == attempt.encode()
        agents = [AgentStore(end.place, 2) for end in (server, client)]
        agents[1].post("state", "text")
        # the one that posted first: a store does not answer that it has a text, but takes the requests of each in turn
        assert agents[1].read(["state"]) == agents[0].read(["state"]) == {"state": "text"}


def test_a_host_listens_for_the_agents_and_the_latest_workers_only(key: Path) -> None:
    """A job may restart its workers often."""

    def listens(port: int) -> bool:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=patience(30)).close()
            return True
        return False

    with open_tunnel(place(free_port(), 1), str(key), print) as client:
        agents, *of_workers = (client.port(number) for number in range(4))
        wait_until(lambda: not any(map(listens, of_workers[:-1])))
        assert listens(agents)
        assert listens(of_workers[-1])
        assert client.port(3) == of_workers[-1]


def test_what_a_host_sent_last_arrives(key: Path) -> None:
    """A store's client does not wait for the answer to a ``set``."""
    port = free_port()
    with open_tunnel(place(port, 0), str(key), print) as server:
        store = store_of(server)
        for number in range(10):
            with open_tunnel(place(port, 1), str(key), print) as client:
                TCPStore("127.0.0.1", client.port(0), wait_for_workers=False).set(f"over{number}", "1")
            wait_until(lambda number=number: store.check([f"over{number}"]))


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0\xff" * 999, b"\x16\x03\x01\xff\xff" + b"x" * 99])
def test_strangers_are_refused_in_one_line_and_disturb_nothing(key: Path, noise: bytes) -> None:
    said: list[str] = []
    with ends(key, said) as (port, server, client):
        store = store_of(server)
        through = TCPStore("127.0.0.1", client.port(0), wait_for_workers=False)
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            for _ in range(5):
                answer(port, noise)
            through.set("a", "b")
            assert store.get("a") == b"b"
        assert said == [f"127.0.0.1:{port}: refused a connection from 127.0.0.1, without this job's cluster.key."]


def test_another_key_and_no_key_do_not_reach_the_store(key: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with ends(key, said) as (port, server, _):
        store_of(server)
        nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
        other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
        other.load_cert_chain(key_file(tmp_path / "other.pem"))
        validation = b"\0\0\0\0" + b"\x09" + (0x3C85F7CE).to_bytes(4, "little")  # as a store's client begins
        for context in (nothing, other):
            with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as plain:
                connection = context.wrap_socket(plain)
                try:
                    connection.sendall(validation)
                    assert connection.recv(1) == b""
                except OSError:
                    pass
                connection.close()
        wait_until(lambda: said)
    assert said == [f"127.0.0.1:{port}: refused a connection from 127.0.0.1, without this job's cluster.key."]


def test_silent_connections_do_not_keep_hosts_out(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "MOST_UNKNOWN", 4)
    monkeypatch.setattr(tunnel, "UNKNOWN_FOR_S", 0.05)
    monkeypatch.setattr(tunnel, "_HANDSHAKE_WITHIN_S", 3600.0)
    with ends(key) as (port, server, client):
        store = store_of(server)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        TCPStore("127.0.0.1", client.port(0), wait_for_workers=False).set("a", "b")
        wait_until(lambda: store.check(["a"]))
        for connection in silent:
            connection.close()


def test_a_store_that_is_gone_is_a_closed_connection(key: Path) -> None:
    port = free_port()
    with open_tunnel(place(port, 1), str(key), print) as client:
        with open_tunnel(place(port, 0), str(key), print) as server:
            store = store_of(server)
            agents = AgentStore(client.place, 2)
            agents.post("state", "text")
            assert agents.read(["state"]) == {"state": "text"}
        with pytest.raises(StoreLost):
            agents.read(["state"])
        assert store.get("board/state") == b"text"


def test_only_the_stores_can_be_reached(key: Path) -> None:
    """Whoever has the key names a store by its number, not a port of node 0."""
    with ends(key) as (port, server, _), socket.create_server(("127.0.0.1", 0)) as other:
        store_of(server)
        with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as plain:
            connection = client_context(key, "cluster.key").wrap_socket(plain)
            connection.sendall(other.getsockname()[1].to_bytes(4))
            assert connection.recv(1) == b""
            connection.close()
