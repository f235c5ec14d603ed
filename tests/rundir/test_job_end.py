"""Ends of a job: exit statuses, and which failures would occur again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.job_end import (
    HANG,
    LOST_PEER,
    end_status,
    failed_summary,
    fails_again,
    failure_record,
    lost_its_peers,
)


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


@pytest.mark.parametrize(
    ("error", "trace", "lost"),
    [
        ("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711.", None, True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited, connection closed", None, True),
        ("RuntimeError: Socket Timeout", '  File ".../torch/distributed/distributed_c10d.py", line 1', True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", '  File "/home/me/data.py", line 3', False),
        ("requests.exceptions.ReadTimeout: Read timed out.", '  File "/home/me/data.py", line 3', False),
        ("ValueError: cursed", '  File ".../torch/distributed/x.py", line 1', False),
        ("killed by SIGKILL", None, False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_ones_own(error: str, trace: str | None, lost: bool) -> None:
    assert lost_its_peers(failure_record(error, None, traceback=trace)) is lost
    assert lost_its_peers(failure_record(error, None, kind=LOST_PEER))


def test_the_log_of_ncccls_watchdog_names_a_lost_peer(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("[rank0]:[E] ProcessGroupNCCL watchdog: NCCL error, connection closed by remote peer\n")
    assert lost_its_peers(failure_record("killed by SIGABRT", log))
    log.write_text("free(): invalid pointer\n")
    assert not lost_its_peers(failure_record("killed by SIGABRT", log))
