"""Check: one line of a report, with its state, the finding, and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.errors import EXIT_DONE, EXIT_FAILED


class CheckState(StrEnum):
    ok = "ok"
    warning = "warning"
    failure = "failure"


@dataclass(frozen=True)
class Check:
    """Result of one check. ``remedy``: empty if ok. ``node``: host, or comma-separated hosts; None for all of them."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""
    node: str | None = None


def ok(name: str, found: str, node: str | None = None) -> Check:
    return Check(name, CheckState.ok, found, node=node)


def warning(name: str, found: str, remedy: str, node: str | None = None) -> Check:
    return Check(name, CheckState.warning, found, remedy, node)


def failure(name: str, found: str, remedy: str, node: str | None = None) -> Check:
    return Check(name, CheckState.failure, found, remedy, node)


def merge(checks: Iterable[tuple[str, Check]], hosts: Sequence[str]) -> list[Check]:
    """Merge equal checks of several hosts; a check that holds for all ``hosts`` names no host.

    Args:
        checks: pairs of a host and a check of it.
    """
    same: dict[Check, list[str]] = {}
    for host, check in checks:
        same.setdefault(check, []).append(host)
    return [
        dataclasses.replace(check, node=None if set(nodes) >= set(hosts) else ", ".join(nodes))
        for check, nodes in same.items()
    ]


def exit_status(checks: Iterable[Check]) -> int:
    """Return 1 if any check is a failure, else 0."""
    return EXIT_FAILED if any(check.state is CheckState.failure for check in checks) else EXIT_DONE
