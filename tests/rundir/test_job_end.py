"""Ends of a job: exit statuses, and which failures would occur again."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.rundir.job_end import HANG, LOST_PEER, end_status, failed_summary, fails_again, failure_record


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        ("ConfigError", 2, True),
        ("TaskError", 2, True),
        ("SiteError", 2, True),
        ("EngineMisuse", 2, True),
        ("WrongCheckpoint", 1, True),
        ("NotFinite", 1, False),
        ("OutOfMemory", 1, False),
        (HANG, 1, False),
        (LOST_PEER, 1, False),
        (None, 1, False),
    ],
)
def test_a_failure_has_the_status_of_its_class(kind: str | None, status: int, again: bool) -> None:
    failure = failure_record("why", None, rank=0, kind=kind)
    assert (end_status(failed_summary(failure)), fails_again(failure)) == (status, again)


@pytest.mark.parametrize(
    ("summary", "stopped_by", "nothing_lost", "status"),
    [
        ({"verdict": "done"}, "", False, 0),
        ({"verdict": "done"}, "SIGTERM", False, 0),
        ({"verdict": "done"}, "Ctrl-C", False, 130),
        ({"verdict": "stopped", "stopped_by": "SIGTERM"}, "SIGTERM", False, 75),
        ({"verdict": "stopped", "stopped_by": "a signal to a worker"}, "", False, 75),
        ({"verdict": "stopped", "stopped_by": "Ctrl-C"}, "", False, 130),
        ({"verdict": "killed"}, "SIGTERM", False, 130),
        ({"verdict": "killed"}, "SIGTERM", True, 75),
        ({"verdict": "killed", "failure": {"exit_code": -9}}, "", True, 1),
        ({"verdict": "cancelled"}, "", False, 1),
    ],
)
def test_a_stop_is_resumable_unless_a_person_typed_ctrl_c(
    summary: dict[str, Any], stopped_by: str, nothing_lost: bool, status: int
) -> None:
    assert end_status(summary, stopped_by, nothing_lost=nothing_lost) == status
