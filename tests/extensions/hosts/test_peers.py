"""Hosts of a running job: one stop, one verdict, and whose failure it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from launcher.rundir.job_end import LOST_PEER
from tests.extensions.hosts.meeting import star, wait_until


def failed(rank: int, at: str | None = None) -> dict[str, Any]:
    return {"verdict": "failed", "failure": {"rank": rank, "error": "boom", "at": at}}


def test_the_first_failure_is_everyones_verdict() -> None:
    first, (one, two), _ = star()
    one.ended(failed(1, "2024-01-01T00:00:05+00:00"))
    first.ended(failed(0, "2024-01-01T00:00:07+00:00"))
    two.ended(failed(2, "2024-01-01T00:00:06+00:00"))
    wait_until(lambda: first.listen(0.01) or first.complete())
    summary = first.conclude()
    assert (summary["failure"]["rank"], summary["failure"]["node"]) == (1, 1)
    for other in (one, two):
        wait_until(lambda other=other: other.listen(0.01) or other.complete())
        assert other.trouble is not None
        assert other.conclude() == summary


def test_a_report_that_arrives_late_comes_before_those_who_lost_its_host() -> None:
    """The report of node 1 was under way for longer than node 0's rank took to notice."""
    first, (one, two), _ = star()
    for peers in (first, two):
        lost = {"failure": {"rank": 0, "kind": LOST_PEER, "error": "lost the connection", "at": None}}
        peers.ended({"verdict": "failed"} | lost)
    wait_until(lambda: first.listen(0.01) or 2 in first._results)
    one.ended(failed(1))
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.conclude()["failure"]["node"] == 1


def test_an_error_that_only_mentions_nccl_is_a_failure_of_its_host() -> None:
    first, (one, two), _ = star()
    own = {"failure": {"rank": 1, "kind": None, "error": "ValueError: No backend NCCL", "at": None}}
    one.ended({"verdict": "failed"} | own)
    wait_until(lambda: first.listen(0.01) or 1 in first._results)
    first.ended(failed(0))
    two.ended(failed(2))
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.conclude()["failure"]["node"] == 1


def test_a_stop_reaches_every_host_and_is_no_failure() -> None:
    first, (one, two), _ = star()
    one.stop("Ctrl-C")
    wait_until(lambda: first.listen(0.01) or first.stopped_by)
    assert first.stopped_by == "node 1 (127.0.0.1)"
    wait_until(lambda: two.listen(0.01) or two.stopped_by)
    for peers in (one, first, two):
        peers.ended({"verdict": "stopped", "stopped_by": "SIGTERM"})
    wait_until(lambda: first.listen(0.01) or first.complete())
    stopped = {"verdict": "stopped", "stopped_by": "Ctrl-C"}
    assert first.conclude() == stopped
    wait_until(lambda: two.listen(0.01) or two.complete())
    assert two.conclude() == stopped


def test_a_host_that_is_gone_comes_before_those_who_lost_it() -> None:
    first, (_, two), ends = star()
    first.ended(failed(0))
    ends[0].close()
    wait_until(lambda: first.listen(0.01) or first.lost)
    wait_until(lambda: two.listen(0.01) or two.lost)
    two.ended(failed(2))
    wait_until(lambda: first.listen(0.01) or first.complete())
    summary = first.conclude()
    assert summary["failure"]["error"].startswith("node 1 (127.0.0.1) is gone")


def test_a_host_that_is_killed_later_is_not_the_first_to_fail() -> None:
    first, (_, two), ends = star()
    ago = [(datetime.now(UTC) - timedelta(seconds=seconds)).isoformat() for seconds in (20, 19)]
    first.ended(failed(0, ago[0]))
    ends[0].close()
    wait_until(lambda: first.listen(0.01) or first.lost)
    two.ended(failed(2, ago[1]))
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.conclude()["failure"]["node"] == 0


def test_without_node_0_a_host_ends_by_itself() -> None:
    first, (one, two), _ = star()
    for guest in first._channels.values():
        guest.close()
    first._listener.close()
    wait_until(lambda: one.listen(0.01) or one.complete())
    assert one.lost
    assert one.conclude()["failure"]["node"] == 0
    two.stop("Ctrl-C")
    wait_until(lambda: two.listen(0.01) or two.complete())
    assert two.conclude() == {"verdict": "killed"}
