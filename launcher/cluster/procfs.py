"""What Linux says of a process: its children, its state, its environment. Elsewhere: nothing."""

from __future__ import annotations

import re
from pathlib import Path


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # that thread has ended
            continue
    return found


def state_of(pid: int) -> str | None:
    """One letter, as proc(5) has it: Z has ended, T is stopped, D waits for a disk; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether its environment, as it was started, says so."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def handles(pid: int, signal: int) -> bool:
    """Whether it has a handler for ``signal``, which would end it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal - 1) & 1)
