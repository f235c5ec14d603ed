"""Shared by the tests of hosts that meet, over loopback sockets."""

from __future__ import annotations

import socket
import time
from typing import Any

from launcher.cluster.network import Interface

TWO = ("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=10.0.0.1:29400", "checkpoint.enabled=false")
LO = Interface("lo", "127.0.0.1")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")
