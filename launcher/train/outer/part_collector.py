"""Part of one site in an exchange through a store, and the exchange in the background of training."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from launcher.plan.outer import OuterPlan
from launcher.quantities import count
from launcher.train.outer.store_client import Closed, OuterExchange, PatientStore


class PartCollector(threading.Thread):
    """Thread that posts this site's part of an exchange, and receives those of the other sites until the exchange is
    closed. It closes the exchange itself when all parts are there, and removes old ones. It does not keep the process
    alive.

    Attributes:
        own: the part of this site.
        sent: it is in the store.
        stored: it was stored, and is not the value of an earlier process of this site.
        parts: those of other sites, so far.
        names: what the store had of this exchange at the last look; None: it has not looked yet.
        closed: the list of members; None: the exchange is open, as far as is known.
    """

    def __init__(
        self, store: PatientStore, plan: OuterPlan, exchange: OuterExchange, own: bytes, saved: Mapping[str, int],
        after: threading.Thread | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            saved: step of the newest checkpoint of each site, as far as it is known.
            after: thread that still sends what nobody needs; this one sends nothing before it has ended.
        """
        super().__init__(name="outer", daemon=True)
        self.own, self._store, self._plan, self._exchange, self._saved = own, store, plan, exchange, saved
        assert plan.site is not None
        self._site, self._others, self._after = plan.site, {*range(plan.sites)} - {plan.site}, after
        self.sent = self.stored = False
        self.parts: dict[int, bytes] = {}
        self.names: set[str] | None = None
        self.closed: Closed | None = None
        self._close_now, self._abandoned = threading.Event(), False
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._after is not None:
                self._after.join()
                self._after = None
            if self._abandoned:
                return
            self.stored = self._store.post(f"{self._exchange.name}/site{self._site}", self.own)
            self.sent = True
            for _ in self._store.tries(self._close_now.wait):
                if self._abandoned or self._advance():
                    return
        except Exception as error:
            self._error = error

    def close_now(self) -> None:
        """Close the exchange as soon as this site's part is in the store, without those that are not there."""
        self._close_now.set()

    def abandon(self) -> None:
        """End the thread as soon as possible: the exchange was closed without this site."""
        self._abandoned = True
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

    def _advance(self) -> bool:
        """Receive what is new, close the exchange if it is time, and return whether it is closed."""
        closes = self._close_now.is_set()
        self.names = names = self._store.names(self._exchange.name)
        if "members" in names:
            closed = self._store.closed(self._exchange)
            self._receive([] if closed is None else closed.members)
            self.closed = closed
        else:
            self._receive(site for site in self._others if f"site{site}" in names)
            if closes or not self._others - self.parts.keys():
                self._close()
        return self.closed is not None

    def _receive(self, sites: Iterable[int]) -> None:
        for site in {*sites} & self._others - self.parts.keys():
            if (part := self._store.get(f"{self._exchange.name}/site{site}")) is not None:
                self.parts[site] = part

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


def make_part(header: dict[str, Any], payload: Tensor) -> bytes:
    """Return a part: the length of its header, the header in JSON, and the payload, which is in host memory."""
    text = json.dumps(header).encode()
    return b"%d\n%b%b" % (len(text), text, payload.numpy().tobytes())


def part_header(value: bytes) -> dict[str, Any]:
    """Return the header of a part."""
    length, _, rest = value.partition(b"\n")
    return json.loads(rest[: int(length)])


def part_problem(
    value: bytes | None, site: int, exchange: OuterExchange, norm: float, history: str, size: int
) -> str | None:  # fmt: skip
    """Return why a member's part of an exchange cannot be used; None if it can."""
    which = f"the part of site {site} in the average after step {exchange.step}"
    if value is None:
        return (
            f"{which} is not there any more, because all sites have saved checkpoints since.\n"
            "  Resume from a newer checkpoint: copy one of another site."
        )
    header = part_header(value)
    first = value.partition(b"\n")[0]
    expected = len(first) + 1 + int(first) + 8 * sum(header["buffers"].values()) + size
    if len(value) != expected:
        return f"{which} has {count(len(value), 'byte')} instead of {expected}: its model has other parameters."
    if header["history"] != history:
        return (
            f"{which} was computed after other averages than those of this site.\n"
            "  Their checkpoints are not of one job: resume all sites from their own."
        )
    if abs(header["norm"] - norm) > 1e-4 * max(abs(norm), 1e-30):
        return (
            f"{which} was computed with shared parameters of norm {header['norm']:g}, and this site's are {norm:g}.\n"
            "  The sites have drifted apart: resume all of them from checkpoints of the same step."
        )
    return None
