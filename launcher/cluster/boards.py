"""Where the agents of a job's hosts leave word for each other while the workers run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from launcher.plan import Place


class Gone(Exception):
    """The board went with node 0."""


class Board(Protocol):
    def post(self, key: str, text: str) -> None:
        """In place of what was there."""
        ...

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Of those that are there."""
        ...


class OwnBoard:
    """Of a job on one host."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self._texts[key] = text

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        return {key: self._texts[key] for key in keys if key in self._texts}


class StoreBoard:
    """On the store that node 0's agent has for the rounds, over a connection of its own: torch's agent asks the same
    store, and neither waits for the other."""

    def __init__(self, place: Place) -> None:
        self._host, _, port = place.store.rpartition(":")
        self._port = int(port)
        self._store: Any = None

    def _connected(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        if self._store is None:
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False)
            self._store = PrefixStore("board", store)
        return self._store

    def post(self, key: str, text: str) -> None:
        """Raises Gone, as ``read`` does."""
        try:
            self._connected().set(key, text)
        except RuntimeError as error:
            raise Gone(str(error)) from error

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        try:
            store = self._connected()
            return {key: store.get(key).decode() for key in keys if store.check([key])}
        except RuntimeError as error:
            raise Gone(str(error)) from error
