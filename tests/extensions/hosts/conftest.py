"""Fixtures of the tests of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from launcher.extensions.hosts.channel import Channel, Listener
from tests.infra.hosts import pair, two_hosts  # noqa: F401


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a real `launch` the end of the process closes what a test leaves open."""
    opened: list[Channel | Listener] = []
    for kind in (Channel, Listener):

        def remember(self: Any, *arguments: Any, make: Any = kind.__init__) -> None:
            make(self, *arguments)
            opened.append(self)

        monkeypatch.setattr(kind, "__init__", remember)
    yield
    for one in opened:
        one.close()
