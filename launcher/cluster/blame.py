"""Which of several hosts failed first, by node 0's clock: what the others say follows from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from launcher.cluster.channel import LOST_AFTER_S, Channel
from launcher.cluster.failure import failure

# a connection that is reset is seen at once, but after the workers' own connections to that host may have been
_RESET_MARGIN_S = 2.0

Summary = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """``when``: on node 0's monotonic clock, of the failure if there is one."""

    status: int
    summary: Summary
    when: float


def first_failure(
    hosts: Mapping[int, str],
    results: Mapping[int, Result],
    gone: Mapping[int, float],
    guests: Mapping[int, Channel],
) -> Summary | None:
    """Of the first host that failed. One that is gone may have been so for a while before that was noticed, and
    whoever lost a peer by it came after it.

    Args:
        hosts: the addresses, by the host's number, as everything here.
        results: of the hosts whose agents have ended.
        gone: when a host was found to be gone, on node 0's monotonic clock.
        guests: the connections.
    """
    failures: list[tuple[float, Summary]] = []
    for node, result in results.items():
        if (told := result.summary.get("failure")) is not None:
            failures.append((result.when, told | {"node": node, "host": hosts[node]}))
    for node, when in gone.items():
        unnoticed = LOST_AFTER_S if guests[node].silent else _RESET_MARGIN_S
        failures.append((when - unnoticed, lost_host(node, guests[node])))
    return min(failures, key=lambda entry: entry[0])[1] if failures else None


def seconds_since_failure(summary: Summary) -> float:
    """How long ago the first failure was by this host's clock; 0 for one whose time is not known."""
    told: Summary = summary.get("failure") or {}
    at = told.get("at")
    return 0.0 if at is None else (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def lost_host(node: int, channel: Channel) -> Summary:
    """The failure that is nobody's own words."""
    why = f"no answer for {LOST_AFTER_S} s" if channel.silent else "its `launch` was killed, or the host was shut down"
    told = failure(f"node {node} ({channel.peer}) is gone: {why}", None)
    return told | {"node": node, "host": channel.peer}
