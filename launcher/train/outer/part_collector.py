"""Exchange of one fragment through a store in the background, while its site takes further steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

from launcher.plan.outer import OuterPlan
from launcher.train.outer.store_client import Closed, OuterExchange, PatientStore
from launcher.train.outer.store_part import part_header


class PartCollector(threading.Thread):
    """Thread that posts this site's part of an exchange, and receives those of the other sites until the exchange is
    closed. It closes the exchange itself when all parts are there, and removes old ones. It does not keep the process
    alive.

    Attributes:
        own: the part of this site.
        sent: it is in the store.
        stored: it was stored, and is not the value of an earlier process of this site.
        parts: those of other sites, so far.
        names: what the store had of this exchange at the last look.
        closed: the list of members; None: the exchange is open, as far as is known.
    """

    def __init__(
        self, store: PatientStore, plan: OuterPlan, exchange: OuterExchange, own: bytes, saved: Mapping[str, int]
    ) -> None:
        """``saved``: step of the newest checkpoint of each site, as far as it is known."""
        super().__init__(name="outer", daemon=True)
        self.own, self._store, self._plan, self._exchange, self._saved = own, store, plan, exchange, saved
        assert plan.site is not None
        self._site, self._others = plan.site, {*range(plan.sites)} - {plan.site}
        self.sent = self.stored = False
        self.parts: dict[int, bytes] = {}
        self.names: set[str] = set()
        self.closed: Closed | None = None
        self._close_now = threading.Event()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.stored = self._store.post(f"{self._exchange.name}/site{self._site}", self.own)
            self.sent = True
            for _ in self._store.tries(self._close_now.wait):
                if self._is_closed():
                    return
        except Exception as error:
            self._error = error

    def close_now(self) -> None:
        """Close the exchange as soon as this site's part is in the store, without those that are not there."""
        self._close_now.set()

    def again(self) -> PartCollector:
        """Return this thread, or another one that tries again what has failed in it: the store could not be reached for
        long."""
        if self._error is None or self.closed is not None:
            return self
        return PartCollector(self._store, self._plan, self._exchange, self.own, self._saved)

    def require_no_error(self) -> None:
        """Raise the error that has ended the thread."""
        if self._error is not None:
            raise self._error

    def _is_closed(self) -> bool:
        """Receive what is new, and return whether the exchange is closed."""
        closes = self._close_now.is_set()
        names = self._store.names(self._exchange.name)
        for site in self._others - self.parts.keys():
            if f"site{site}" in names and (part := self._store.get(f"{self._exchange.name}/site{site}")) is not None:
                self.parts[site] = part
        self.names = names
        if "members" in names:
            self.closed = self._store.closed(self._exchange)
        elif closes or not self._others - self.parts.keys():
            self._close()
        return self.closed is not None

    def _close(self) -> None:
        saved = {str(site): part_header(part)["saved"] for site, part in self.parts.items()}
        saved = {**self._saved, **saved, str(self._site): part_header(self.own)["saved"]}
        members = sorted({self._site, *self.parts})
        document = json.dumps({"members": members, "saved": saved}).encode()
        if self._store.decide(f"{self._exchange.name}/members", document) == document:
            self.closed = Closed(self._exchange, members, saved)
            self._remove_old(saved)

    def _remove_old(self, saved: Mapping[str, int]) -> None:
        """Remove parts that no site needs to resume from its newest checkpoint, or from the one before. The lists of
        members stay, so that a site that resumes from an even older one notices it."""
        # the site that closed the exchange before has removed what was not needed then
        first, last = self._not_needed_until(self._saved), self._not_needed_until(saved)
        for step in range(max(0, first) + 1, min(last, self._exchange.step - 1) + 1):
            for fragment in self._plan.fragments_after(step):
                for site in range(self._plan.sites):
                    self._store.remove(f"{OuterExchange(step, fragment).name}/site{site}")

    def _not_needed_until(self, saved: Mapping[str, int]) -> int:
        return min(saved.get(str(site), 0) for site in range(self._plan.sites)) - self._plan.every
