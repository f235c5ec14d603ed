"""The agent's way of ending workers: torch's own wait after a failure has no setting."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from launcher.config.schema import Device
from launcher.launch import flight_recorder
from launcher.launch.agent import (  # pyright: ignore[reportPrivateUsage]
    _allocator,
    _Failures,
    _flight_recorder,
    _grace_s,
    _workers_end_within,
)
from launcher.launch.watchdog import NoWatch
from tests.helpers import make_plan


@pytest.mark.parametrize("arguments", [(), (signal.SIGTERM,), (signal.SIGINT, 30)])
def test_workers_are_killed_after_the_given_time_on_every_path(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    waits = list[int]()
    monkeypatch.setattr(api.PContext, "close", lambda *arguments: waits.append(arguments[-1]))
    before = api.PContext.close
    with _workers_end_within(lambda: 3, lambda _: None):
        api.PContext.close(object(), *arguments)  # type: ignore[arg-type]
    assert waits == [3]
    assert api.PContext.close is before


@pytest.mark.parametrize(("grace_s", "failed", "stopped"), [(30, 3, 30), (3, 3, 3), (1, 1, 1)])
def test_only_a_stop_leaves_workers_the_whole_time(grace_s: int, failed: int, stopped: int) -> None:
    """A rank that is blocked in C never runs its handler, and a failed job has nothing to save."""
    plan: Any = make_plan(f"cluster.grace_s={grace_s}")
    found = [_grace_s(plan, SimpleNamespace(received=signum)) for signum in (None, signal.SIGTERM)]  # type: ignore[arg-type]
    assert found == [failed, stopped]


@pytest.mark.parametrize(
    ("device", "node", "variable", "grows"),
    [
        (Device.cuda, "nvidiactl", "OTHER", True),
        (Device.cuda, "nvidiactl", "PYTORCH_ALLOC_CONF", False),
        (Device.cuda, "nvidiactl", "PYTORCH_CUDA_ALLOC_CONF", False),
        (Device.cuda, "dxg", "OTHER", False),
        (Device.cpu, "nvidiactl", "OTHER", False),
    ],
)
def test_the_allocators_segments_grow_unless_the_user_has_configured_it(
    device: Device, node: str, variable: str, grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / node).touch()
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    cluster: Any = SimpleNamespace(device=device)
    plan = dataclasses.replace(make_plan(), cluster=cluster)
    assert _allocator(plan, tmp_path) == ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if grows else {})
    script: Any = SimpleNamespace(cluster=cluster)
    assert _allocator(script, tmp_path) == {}, "memory pools, which a script may use, do not work with it"


def test_workers_have_a_pipe_only_if_a_hang_watch_uses_it() -> None:
    plan = dataclasses.replace(make_plan(), cluster=SimpleNamespace(device=Device.cuda))  # type: ignore[arg-type]
    watch: Any = object()
    with _flight_recorder(plan, watch) as watched, _flight_recorder(plan, NoWatch()) as unwatched:
        assert watched.keys() - unwatched.keys() == {flight_recorder.PIPE}
        assert Path(watched[flight_recorder.PIPE]).parent.is_dir()
        assert flight_recorder.FILE in unwatched


@pytest.mark.parametrize(
    ("nodes", "error", "words"),
    [
        (
            2,
            "RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer",
            "a worker on another node failed",
        ),
        (1, "RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer", "rank 0: RuntimeError: gloo"),
        (2, "torch.distributed.DistBackendError: NCCL Error 1: unhandled cuda error", "rank 0: torch.distributed"),
    ],
)
def test_a_rank_that_lost_its_peer_is_not_the_cause_of_a_restart_on_several_hosts(
    nodes: int, error: str, words: str
) -> None:
    """Also in a script of `launch run`, whose errors are not classified."""
    failures: Any = SimpleNamespace(
        _ended={0: (1, 1)}, _plan=SimpleNamespace(cluster=SimpleNamespace(nodes=nodes)),
        first=lambda _: {"kind": None, "error": error, "rank": 0},
    )  # fmt: skip
    assert _Failures.cause_of_restart(failures).startswith(words)
