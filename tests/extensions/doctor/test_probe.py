"""Probes of two hosts, both simulated on this one."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from launcher.extensions.doctor import bandwidth, probe, slurm_checks
from launcher.extensions.doctor.bandwidth import KINDS, Worker
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

bandwidth.inspect_torch = lambda worker: {{}}
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


FAILING_WORKER = """#!{python}
import sys
from launcher.extensions.doctor import bandwidth

def samples(worker):
    raise RuntimeError("NCCL error")

bandwidth.inspect_torch = lambda worker: {{"gpus": 2, "tried": [worker.local]}}
bandwidth._samples = samples
bandwidth.main(*sys.argv[-2:])
"""


def test_what_a_worker_has_found_is_kept_if_a_collective_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(FAILING_WORKER.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(bandwidth.sys, "executable", str(script))
    workers = [Worker(rank, 2, rank, 2, "", "cuda", os.getpid()) for rank in range(2)]
    found = bandwidth.measure(workers, dict(os.environ))
    assert found == {"error": "RuntimeError: NCCL error", "gpus": 2, "tried": [0, 1]}


def test_a_gpu_is_tried_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert bandwidth.product_error(cpu, torch.bfloat16) < 0.01
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    alone = bandwidth.inspect_torch(Worker(0, 1, 0, 1, "", "cuda", 0))
    assert [gpu["index"] for gpu in alone["tried"]] == [0, 1], "a worker alone tries all of them"
    assert all(gpu["error"] < 0.01 for gpu in alone["tried"])
    second = bandwidth.inspect_torch(Worker(1, 2, 1, 2, "", "cuda", 0))["tried"]
    assert [gpu["index"] for gpu in second] == [1]

    def fails(*_: object) -> float:
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nCUDA kernel errors might be reported")

    monkeypatch.setattr(bandwidth, "product_error", lambda *_: math.nan)
    assert bandwidth._try_gpu(0)["problem"] == "its products are not finite"
    monkeypatch.setattr(bandwidth, "product_error", fails)
    assert bandwidth._try_gpu(0)["problem"] == "CUDA error: an illegal instruction was encountered"


def test_limits_of_time_suffice_for_a_cold_import_and_fit_into_the_job() -> None:
    measuring_s = 2 * len(KINDS) * bandwidth._MEASURE_S
    assert bandwidth._RENDEZVOUS_S + bandwidth._COLLECTIVE_S + measuring_s <= bandwidth._WITHIN_S
    meeting_s = 2 * probe._FIRST_FACTS_WITHIN_S + probe._LINKS_WITHIN_S  # for node 0's address, then for the others'
    start_s = 60
    own_s = probe._SMI_WITHIN_S + probe._WANDB_WITHIN_S
    assert start_s + own_s + meeting_s + bandwidth._WITHIN_S <= slurm_checks._LIMIT_S


@pytest.mark.parametrize("capable", [False, True])
def test_ports_of_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capable: bool) -> None:
    assert probe.infiniband_facts(tmp_path) is None
    for name, state, rate in (("mlx5_0", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n"), ("mlx5_1", "1: DOWN\n", "")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(
        f"CapPrm:\t0\nCapEff:\t{'0000000000004000' if capable else '00000000a80425fb'}\n"
    )
    loaded: list[str] = []
    monkeypatch.setattr(probe.ctypes, "CDLL", loaded.append)
    monkeypatch.setattr(probe.resource, "getrlimit", lambda _: (65536, 65536))
    ports = [["mlx5_0:1", True, 400.0], ["mlx5_1:1", False, 0.0]]
    locked = None if capable else 65536
    expected = {"ports": ports, "library": True, "devices": False, "locked_bytes": locked}
    assert probe.infiniband_facts(tmp_path) == expected
    assert loaded == ["libibverbs.so.1"]
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(probe.ctypes, "CDLL", missing)
    monkeypatch.setattr(probe.resource, "getrlimit", lambda _: (probe.resource.RLIM_INFINITY,) * 2)
    assert probe.infiniband_facts(tmp_path) == expected | {"library": False, "devices": True, "locked_bytes": None}


def test_groups_that_run_at_the_same_time() -> None:
    assert bandwidth.group_shapes(1, 1) == []
    assert bandwidth.group_shapes(1, 3) == [[[0, 1, 2]]]
    assert bandwidth.group_shapes(3, 1) == [[[0, 1, 2]]]
    inside, across = bandwidth.group_shapes(2, 2)
    assert (inside, across) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
