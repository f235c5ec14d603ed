"""The agent's way of ending workers: torch's own wait after a failure has no setting."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from launcher.launch.agent import _Failures, _workers_end_within  # pyright: ignore[reportPrivateUsage]


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


@pytest.mark.parametrize(
    ("nodes", "words"), [(2, "a worker on another node failed"), (1, "rank 0: RuntimeError: gloo")]
)
def test_a_rank_that_lost_its_peer_is_not_the_cause_of_a_restart_on_several_hosts(nodes: int, words: str) -> None:
    """Also in a script of `launch run`, whose errors are not classified."""
    error = "RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer"
    failures: Any = SimpleNamespace(
        _ended={0: (1, 1)}, _plan=SimpleNamespace(cluster=SimpleNamespace(nodes=nodes)),
        first=lambda _: {"kind": None, "error": error, "rank": 0},
    )  # fmt: skip
    assert _Failures.cause_of_restart(failures).startswith(words)
