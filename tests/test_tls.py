"""Mutual TLS: who gets in, and what a wrong key file says."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.tls import client_context, server_context
from tests.helpers import key_file

DAY_S = 86400
Context = Callable[[Path, str], ssl.SSLContext]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture(scope="module")
def other_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("other") / "key.pem")


def talk(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes, ssl.SSLError | None]:
    """Return the bytes that the server reads from a client that sends "hello", and the server's error, if any."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(10)
    result: list[tuple[bytes, ssl.SSLError | None]] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ends[0], server_side=True) as connection:
                result.append((connection.recv(99), None))
        except ssl.SSLError as error:
            result.append((b"", error))
        ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ends[1]) as connection:
            connection.sendall(b"hello")
            assert connection.recv(1) == b""
    except OSError:
        pass
    ends[1].close()
    thread.join()
    return result[0]


def test_two_sides_with_the_same_file_talk(key: Path) -> None:
    assert talk(server_context(key, "cluster.key"), client_context(str(key), "cluster.key")) == (b"hello", None)


def test_another_key_no_key_and_an_old_protocol_do_not_get_in(key: Path, other_key: Path) -> None:
    server = server_context(key, "cluster.key")
    stranger = client_context(other_key, "cluster.key")
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # what anybody has who found the port
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    impostor = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    impostor.check_hostname, impostor.verify_mode = False, ssl.CERT_NONE
    impostor.load_cert_chain(other_key)
    old = client_context(key, "cluster.key")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    for client in (stranger, trusting, impostor, old):
        data, error = talk(server, client)
        assert data == b""
        assert error is not None


def test_a_client_does_not_talk_to_a_server_with_another_key(key: Path, other_key: Path) -> None:
    lenient = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    lenient.load_cert_chain(other_key)
    assert talk(lenient, client_context(key, "cluster.key"))[0] == b""


@pytest.mark.parametrize("context", [server_context, client_context])
def test_a_wrong_key_file_is_one_message_with_the_remedy(
    context: Context, key: Path, other_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = key.read_text(), other_key.read_text()
    at = text.index("-----BEGIN CERTIFICATE")
    private, certificate = text[:at], text[at:]
    file = tmp_path / "wrong.pem"
    contents = {
        "": "is not a private key",
        private: "is not a private key",
        certificate: "is not a private key",
        other[: other.index("-----BEGIN CERTIFICATE")] + certificate: "key values mismatch",
        text + other[other.index("-----BEGIN CERTIFICATE") :]: "one self-signed certificate, and no other",
    }
    for content, problem in contents.items():
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=problem) as caught:
            context(file, "outer.key")
        assert str(caught.value).startswith(f"outer.key={file}: ")
        assert f"-out {file} -keyout {file}" in str(caught.value)
    file.write_text(text)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"others can read this private key.\n  chmod 600 {file}"):
        context(file, "outer.key")
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        context(tmp_path / "missing.pem", "outer.key")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        context(tmp_path, "outer.key")
    now = time.time()
    for days, problem in ((3651, "expired on"), (-2, "is not valid before")):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda days=days: now + days * DAY_S)
            with pytest.raises(ConfigError, match=problem):
                context(key, "outer.key")


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(key: Path, tmp_path: Path) -> None:
    file = tmp_path / "locked.pem"
    locked = subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word"], check=True, capture_output=True, text=True
    ).stdout
    text = key.read_text()
    file.write_text(locked + text[text.index("-----BEGIN CERTIFICATE") :])
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="without a passphrase"):
        server_context(file, "cluster.key")
