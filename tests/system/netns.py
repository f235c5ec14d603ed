"""A network namespace of a test's own: nobody else's bytes are on its loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def network_namespace() -> Iterator[str]:
    """Make one with its loopback up; it is gone afterwards, whatever happened."""
    name = f"launcher-test-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def sent_bytes(name: str, interface: str = "lo") -> int:
    """What an interface of the namespace has sent since it was made."""
    text = subprocess.run(
        ["ip", "netns", "exec", name, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True
    ).stdout
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{interface}:"))
    return int(line.partition(":")[2].split()[8])


def can_make_namespaces() -> bool:
    """Root in a container may be without the capability."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with network_namespace():
            return True
    except subprocess.CalledProcessError:
        return False


needs_root = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs root and iproute2 for a network namespace of its own"
)
