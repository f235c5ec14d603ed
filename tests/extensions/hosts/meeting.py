"""Shared by the tests of hosts that meet, over loopback sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from launcher.extensions.hosts.channel import Channel, Listener
from launcher.extensions.hosts.peers import FirstHost, OtherHost
from launcher.launch import network
from launcher.launch.network import Interface
from tests.infra.runs import wait_for

TWO = ("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=10.0.0.1:29400", "checkpoint.enabled=false")
LO = Interface("lo", "127.0.0.1")


free_port = partial(network.free_port, "127.0.0.1")


def wait_until(condition: Callable[[], object]) -> None:
    wait_for(condition, "it to come true", every_s=0.01)


def star(least: int | None = None) -> tuple[FirstHost, list[OtherHost], list[Channel]]:
    """Node 0, and two others, after their meeting."""
    listener = Listener(("127.0.0.1", 0))
    ends = [Channel(socket.create_connection(("127.0.0.1", listener.port))) for _ in range(2)]
    guests: list[Channel] = []
    for end in ends:
        end.send(launch="launcher 1")
    wait_until(lambda: guests.extend(channel for channel, _ in listener.arrivals()) or len(guests) == 2)
    for end in ends:
        assert end.next(10) == {"launch": "launcher 1"}
    by_port = {end._socket.getsockname()[1]: end for end in ends}
    ends = [by_port[guest._socket.getpeername()[1]] for guest in guests]
    return FirstHost(listener, guests, "127.0.0.1", "full", least), [OtherHost(end) for end in ends], ends
