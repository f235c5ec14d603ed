"""One line of what was looked at, by the doctor first of all: how it stands, what was found, what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.errors import EXIT_DONE, EXIT_FAILED


class State(StrEnum):
    ok = "ok"
    warning = "warning"
    failure = "failure"


@dataclass(frozen=True)
class Check:
    """``node``: the host, or several with commas, that it is about; None for all of them. ``remedy``: empty where it is
    ok."""

    name: str
    state: State
    found: str
    remedy: str = ""
    node: str | None = None


def ok(name: str, found: str, node: str | None = None) -> Check:
    return Check(name, State.ok, found, node=node)


def warning(name: str, found: str, remedy: str, node: str | None = None) -> Check:
    return Check(name, State.warning, found, remedy, node)


def failure(name: str, found: str, remedy: str, node: str | None = None) -> Check:
    return Check(name, State.failure, found, remedy, node)


def merge(checks: Iterable[Check], hosts: Sequence[str]) -> list[Check]:
    """What several hosts have word for word in common, as one: of all ``hosts``, no host is named."""
    same: dict[Check, list[str]] = {}
    for check in checks:
        same.setdefault(dataclasses.replace(check, node=None), []).append(check.node or "")
    return [
        dataclasses.replace(check, node=None if set(nodes) >= set(hosts) else ", ".join(nodes))
        for check, nodes in same.items()
    ]


def exit_status(checks: Iterable[Check]) -> int:
    return EXIT_FAILED if any(check.state is State.failure for check in checks) else EXIT_DONE
