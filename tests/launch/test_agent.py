"""The agent's way of ending workers: torch's own wait after a failure has no setting."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from launcher.launch.agent import _workers_end_within  # pyright: ignore[reportPrivateUsage]


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
