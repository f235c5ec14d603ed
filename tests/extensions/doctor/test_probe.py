"""Probes of two hosts, both simulated on this one."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from launcher.extensions.doctor import bandwidth, probe
from launcher.extensions.doctor.bandwidth import Worker
from launcher.extensions.doctor.probe import Exchange
from tests.helpers import patience


def test_a_clock_is_compared_by_round_trips() -> None:
    with probe.clock_server("127.0.0.1") as port:
        (found,) = probe.reach_all({3: ("127.0.0.1", port)})
    assert found["node"] == 3
    assert found["problem"] == ""
    assert 0 < found["rtt_s"] < 1
    assert abs(found["offset_s"]) < found["rtt_s"]


def test_a_clock_that_is_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true_time = time.time
    with probe.clock_server("127.0.0.1") as port:
        asked = iter(range(10**6))
        # the two hosts read the time in turn, this one first
        monkeypatch.setattr(probe.time, "time", lambda: true_time() + (5.0 if next(asked) % 2 else 0.0))
        found = probe.reach("127.0.0.1", port)
    assert found["offset_s"] == pytest.approx(5.0, abs=0.1)


def test_a_closed_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert probe.reach("127.0.0.1", port)["problem"] == "Connection refused"


def test_hosts_wait_for_each_other_but_not_for_one_that_is_done(tmp_path: Path) -> None:
    first, second = Exchange(tmp_path, 0, 2), Exchange(tmp_path, 1, 2)
    first.publish(host="a", port=1)
    begun = time.monotonic()
    assert first.wait("port", {0, 1}, 0.3).keys() == {0}
    assert time.monotonic() - begun >= 0.3
    second.publish(host="b", done=True)
    assert first.wait("port", {0, 1}, 1_000_000).keys() == {0}, "and not at the end of the limit"
    assert probe.read_answers(tmp_path, 2)[1] == {"host": "b", "done": True}


LOGGING_WORKER = """#!{python}
import os, sys, time
from pathlib import Path
from launcher.extensions.doctor import bandwidth
from launcher.extensions.doctor.bandwidth import Sample

def samples(worker):
    rank, done = worker.rank, Path({done!r})
    for output in (1, 2):
        os.write(output, b"NCCL INFO\\n" * 20_000)
    (done / str(rank)).touch()
    while not all((done / str(other)).exists() for other in range(worker.world)):
        time.sleep(0.01)
    return [Sample(kind="all_reduce", payload_bytes=4, ranks=2, hosts=1, groups=1, seconds=0.5 + rank)]

def leave(status):
    os.write(1, b"NCCL INFO destroyed\\n")
    os._exit(status)

bandwidth._samples, bandwidth.exit_without_teardown = samples, leave
bandwidth.main(*sys.argv[-2:])
"""


def test_workers_that_log_more_than_a_pipe_holds_have_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(LOGGING_WORKER.format(python=sys.executable, done=str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setattr(bandwidth, "_WITHIN_S", patience(10))
    monkeypatch.setattr(bandwidth.sys, "executable", str(script))
    workers = [Worker(rank, 2, rank, 2, "", "cpu", os.getpid()) for rank in range(2)]
    (sample,) = bandwidth.measure(workers, dict(os.environ))["samples"]
    assert sample["seconds"] == 0.5


def test_groups_that_run_at_the_same_time() -> None:
    assert bandwidth.group_shapes(1, 1) == []
    assert bandwidth.group_shapes(1, 3) == [[[0, 1, 2]]]
    assert bandwidth.group_shapes(3, 1) == [[[0, 1, 2]]]
    inside, across = bandwidth.group_shapes(2, 2)
    assert (inside, across) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
