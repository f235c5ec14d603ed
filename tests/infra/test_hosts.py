"""Links with a delay and losses, which pass through a thread."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.infra.hosts import hosts
from tests.infra.netns import needs_root

DELAY_S, SIZE = 0.02, 300_000
SERVER = f"""
import socket
server = socket.create_server(("", 4000))
print("ready", flush=True)
connection, _ = server.accept()
received = b""
while data := connection.recv(65536):
    received += data
print(received == bytes(range(250)) * {SIZE // 250})
"""
CLIENT = f"""
import socket, sys, time
started = time.monotonic()
with socket.create_connection((sys.argv[1], 4000)) as connection:
    print(time.monotonic() - started)
    connection.sendall(bytes(range(250)) * {SIZE // 250})
"""


@needs_root
def test_a_stream_crosses_a_link_with_delay_and_losses(tmp_path: Path) -> None:
    with hosts(2, "100mbit", DELAY_S, 0.05) as there:
        server = there.start(1, [sys.executable, "-c", SERVER], tmp_path)
        assert server.stdout.readline() == "ready\n"
        client = there.start(0, [sys.executable, "-c", CLIENT, there.address(1)], tmp_path)
        output, _ = client.communicate()
        assert client.returncode == 0, output
        assert float(output) > 2 * DELAY_S, "a connection takes a round trip"
        received, _ = server.communicate()
        assert received == "True\n"
