"""A network namespace of a test's own: nobody else's bytes are on its loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.infra import warm


def namespace_named(name: str) -> None:
    """Make one with its loopback up; `ip netns del` ends it."""
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)


def inside(name: str) -> Callable[[], None]:
    """Return the ``preexec_fn`` with which a process starts in a namespace."""
    return partial(warm.join_network, f"/run/netns/{name}")


@contextmanager
def network_namespace() -> Iterator[str]:
    """One that is gone afterwards, whatever happened."""
    name = f"launcher-test-{os.getpid()}"
    try:
        namespace_named(name)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def pids_in(name: str) -> list[int]:
    """Every process in a namespace."""
    done = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def counters(name: str, interface: str) -> list[int]:
    """The line of /proc/net/dev: received bytes and packets are 0 and 1, sent ones 8 and 9."""
    command = ["ip", "netns", "exec", name, "cat", "/proc/net/dev"]
    return counters_in(subprocess.run(command, check=True, capture_output=True, text=True).stdout, interface)


def counters_in(text: str, interface: str) -> list[int]:
    """The same, of the file's own text."""
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{interface}:"))
    return [int(number) for number in line.partition(":")[2].split()]


def sent_bytes(name: str, interface: str = "lo") -> int:
    """Return the number of bytes that an interface of the namespace has sent since it was made."""
    return counters(name, interface)[8]


def can_make_namespaces() -> bool:
    """Root in a container may be without the capability."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    try:
        with network_namespace():
            return True
    except subprocess.CalledProcessError:
        return False


needs_root = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs root and iproute2 for a network namespace of its own"
)
