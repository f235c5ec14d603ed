"""Fixtures of the tests of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from launcher.launch.channel import Channel, Listener


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
