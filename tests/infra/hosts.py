"""Hosts for the tests: network namespaces on a bridge, each with links that can be slowed, cut and counted.

    python -m tests.infra.hosts --rate 100mbit -- COMMAND ...      # on two of them; {first} is the first one's address
    python -m tests.infra.hosts --round-trip-ms 50 --loss 0.01 -- COMMAND ...

The bridge has a namespace of its own too, so that nothing of the machine's own network changes. Deleting a namespace
takes its interfaces with it. Links with a delay or with losses pass through a thread instead, because netem is a module
that many kernels lack.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import patience
from tests.infra import warm
from tests.infra.netns import inside, namespace_named, pids_in

NET = "10.213.7"
# 50 ms of queue; a burst never below two of the kernel's 64 KiB packets, or the rate is never reached
BURST_BYTES, LATENCY = 131072, "50ms"
serial = numbers()
# of linux/if_tun.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Relay(threading.Thread):
    """Thread that passes packets between the hosts' eth0, which are TUN devices, later than they were sent, or never.

    Args:
        names: of the hosts' namespaces.
        delay_s: of each packet.
        loss: share of the packets that are lost.
    """

    def __init__(self, names: list[str], delay_s: float, loss: float) -> None:
        super().__init__(daemon=True)
        self._names, self._delay_s, self._loss = names, delay_s, loss
        self._files: list[int] = []
        self._ready, self._ends = threading.Event(), threading.Event()

    def open(self) -> None:
        """Make the devices, and start."""
        self.start()
        assert self._ready.wait(patience(10)), "no TUN devices"

    def close(self) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        for name in self._names:
            warm.join_network(f"/run/netns/{name}")  # of this thread only
            self._files.append(os.open("/dev/net/tun", os.O_RDWR))
            fcntl.ioctl(self._files[-1], TUNSETIFF, struct.pack("16sH14x", b"eth0", IFF_TUN | IFF_NO_PI))
        self._ready.set()
        waiting, chance = deque[tuple[float, int, bytes]](), random.Random(0)
        with selectors.DefaultSelector() as selector:
            for file in self._files:
                selector.register(file, selectors.EVENT_READ)
            while not self._ends.is_set():
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    _, host, packet = waiting.popleft()
                    os.write(self._files[host], packet)
                for key, _ in selector.select(max(0.0, waiting[0][0] - now) if waiting else 0.1):
                    packet = os.read(key.fd, 65536)
                    host = packet[19] - 11  # of the IPv4 destination
                    if packet[0] >> 4 == 4 and 0 <= host < len(self._files) and chance.random() >= self._loss:
                        waiting.append((time.monotonic() + self._delay_s, host, packet))
        for file in self._files:
            os.close(file)


@dataclass
class Hosts:
    """``names``: of the namespaces, by the host's number. Every host has eth0, and an eth1 that leads nowhere.
    ``relay``: connects their eth0 in place of the bridge."""

    stem: str
    switch: str
    names: list[str]
    relay: Relay | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list["subprocess.Popen[str]"])

    def address(self, host: int) -> str:
        return f"{NET}.{11 + host}"

    def start(self, host: int, command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> Any:
        """``command`` on a host, as a process; its output and errors together in ``stdout``."""
        process = warm.Popen(
            command,
            preexec_fn=inside(self.names[host]),
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def set_rate(self, rate: str) -> None:
        """Set the rate of every link, in both directions, such as 100mbit."""
        shape = ["root", "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", LATENCY]
        for host, name in enumerate(self.names):
            ends = [(name, "eth0"), (self.switch, f"port{host}")]
            for place, device in ends if self.relay is None else ends[:1]:
                command = ["tc", "-n", place, "qdisc", "replace", "dev", device, *shape]
                subprocess.run(command, check=True, capture_output=True)

    def link_down(self, host: int) -> None:
        """Cut its link; nothing tells its peers."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def link_up(self, host: int) -> None:
        ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def pids(self, host: int) -> list[int]:
        """Every process on a host."""
        return pids_in(self.names[host])

    def end(self) -> None:
        """Kill what still runs on any of them, or on the switch."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()
        end = time.monotonic() + patience(10)
        while left := [pid for name in (self.switch, *self.names) for pid in pids_in(name)]:
            assert time.monotonic() < end, f"killed processes that do not die: {left}"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def hosts(count: int, rate: str = "1gbit", delay_s: float = 0, loss: float = 0) -> Iterator[Hosts]:
    """``count`` hosts that reach each other; all gone afterwards, whatever happened. ``delay_s``, ``loss``: of each
    packet, in each direction; links with one of them cannot be cut."""
    stem = f"lt{os.getpid()}-{next(serial)}"
    made: list[str] = []
    there = Hosts(stem, f"{stem}-switch", [f"{stem}-host{host}" for host in range(count)])
    if delay_s or loss:
        there.relay = Relay(there.names, delay_s, loss)
    try:
        for name in (there.switch, *there.names):
            namespace_named(name)
            made.append(name)
        ip("-n", there.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", there.switch, "link", "set", "bridge", "up")
        if there.relay is not None:
            there.relay.open()
        for host, name in enumerate(there.names):
            if there.relay is None:
                port = f"port{host}"
                ip("-n", there.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", there.switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{there.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            spare = f"spare{host}"  # carries nothing: its other end is on no bridge
            ip("-n", there.switch, "link", "add", spare, "type", "veth", "peer", "name", "eth1", "netns", name)
            ip("-n", there.switch, "link", "set", spare, "up")
            ip("-n", name, "addr", "add", "10.99.0.1/24", "dev", "eth1")
            ip("-n", name, "link", "set", "eth1", "up")
        there.set_rate(rate)
        yield there
    finally:
        if len(made) == 1 + count:
            there.end()
        if there.relay is not None and there.relay.is_alive():
            there.relay.close()
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as two:
        yield two


@pytest.fixture
def pair(two_hosts: Hosts) -> Iterator[Hosts]:
    """No process of one test meets the next one."""
    yield two_hosts
    two_hosts.end()


def main() -> None:
    """Run a command on every host of several; the first one's output is shown. Exits with the first status
    that is not 0.

    In the command, {first} is replaced by its address, and {host} by the host's number.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--round-trip-ms", type=float, default=0)
    parser.add_argument("--loss", type=float, default=0, help="share of the packets that are lost")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    count = arguments.hosts
    with hosts(count, arguments.rate, arguments.round_trip_ms / 2e3, arguments.loss) as there:

        def start(host: int, words: list[str]) -> subprocess.Popen[str]:
            for place, value in {"{first}": there.address(0), "{host}": str(host)}.items():
                words = [word.replace(place, value) for word in words]
            return there.start(host, words, Path.cwd())

        first, *others = (start(host, arguments.command[1:]) for host in range(count))  # after the "--"
        for line in first.stdout:
            print(line, end="", flush=True)
        status = first.wait()
        for other in others:
            output, _ = other.communicate()
            if other.returncode:
                print(output)
                status = status or other.returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
