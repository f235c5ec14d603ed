"""Node 0 of a running job over several hosts: who is gone, whether the others go on, and the verdict of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launcher.cluster.blame import Result, Summary, first_failure, seconds_since_failure
from launcher.cluster.channel import Channel, Door, Message, wait
from launcher.cluster.network import free_port
from launcher.cluster.peers import Again
from launcher.errors import EXIT_FAILED, EXIT_INTERRUPTED


class FirstHost:
    """Peers of node 0, which hears from all the others, and tells them."""

    def __init__(
        self, door: Door, guests: Sequence[Channel], address: str, refusal: str, least: int | None = None
    ) -> None:
        """``guests``: the others by their number, from 1. ``refusal``: for a host that comes too late. ``least``: with
        how many hosts the job goes on when one is lost; None: it ends."""
        self._door, self._address, self._refusal, self._least = door, address, refusal, least
        self._begin_with(guests)

    def _begin_with(self, guests: Sequence[Channel]) -> None:
        self._guests = dict(enumerate(guests, 1))
        self._hosts = {0: self._address} | {node: guest.peer for node, guest in self._guests.items()}
        self._results: dict[int, Result] = {}
        self._gone: dict[int, float] = {}
        self._again: Again | None = None
        self._stopped = False
        self.stopped_by: str | None = None
        self.trouble: str | None = None
        self.lost = False

    def listen(self, seconds: float) -> None:
        wait([*self._door.sources(), *(guest for guest in self._guests.values() if guest.open)], seconds)
        for channel, _ in self._door.arrivals():
            channel.send(refused=self._refusal)
            channel.close()
        for node, guest in self._guests.items():
            for message in guest.receive():
                self._take_in(node, message)
            if not guest.open and node not in self._results and node not in self._gone:
                self._gone[node] = time.monotonic()
                self.lost = True
                self._tell_trouble(f"{self._name(node)} is gone", node)

    def _take_in(self, node: int, message: Message) -> None:
        if "stop" in message:
            self._stopped = True
            self.stopped_by = self._name(node)
            self._tell(node, stop=self.stopped_by)
        elif "ended" in message:
            self._add(node, message["status"], message["summary"], message["ago_s"])

    def _add(self, node: int, status: int, summary: Summary, ago_s: float) -> None:
        self._results[node] = Result(status, summary, time.monotonic() - ago_s)
        if "failure" in summary and not self._stopped:
            self._tell_trouble(f"the job failed on {self._name(node)}", node)

    def _tell_trouble(self, text: str, node: int) -> None:
        if node:
            self.trouble = self.trouble or text
        self._tell(node, trouble=text, lost=self.lost)

    def _tell(self, but: int, **message: Any) -> None:
        for node, guest in self._guests.items():
            if node != but:
                guest.send(**message)

    def _name(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})"

    def stop(self) -> None:
        self._stopped = True
        self._tell(0, stop=self._name(0))

    def ended(self, status: int, summary: Summary) -> None:
        self._add(0, status, summary, seconds_since_failure(summary))

    def complete(self) -> bool:
        return all(node in self._results or node in self._gone for node in self._hosts)

    def conclude(self) -> tuple[int, Summary]:
        status, summary = self._verdict()
        self._tell(0, verdict=summary, status=status)
        self._door.close()
        for guest in self._guests.values():
            guest.close()
        return status, summary

    def _verdict(self) -> tuple[int, Summary]:
        own = dict(self._results[0].summary)
        first = self._first_failure()
        if self._stopped or first is None:
            if own.pop("failure", None) is not None:
                own["verdict"] = "killed"
            return EXIT_INTERRUPTED if self._stopped else max(r.status for r in self._results.values()), own
        own.pop("stopped_by", None)  # that was this launcher, for the reason that follows
        if first["node"] in self._gone and self._least is not None:  # else it would have gone on
            left = len(self._left())
            few = f"{left} {'host is' if left == 1 else 'hosts are'} left, and cluster.nodes has {self._least} at least"
            first = first | {"error": f"{first['error']}; {few}"}
        return EXIT_FAILED, own | {"verdict": "failed", "failure": first}

    def _first_failure(self) -> Summary | None:
        return first_failure(self._hosts, self._results, self._gone, self._guests)

    def _left(self) -> list[int]:
        """Hosts that hear of it when the job goes on; one may have gone after its workers had ended."""
        return [node for node in self._hosts if not node or self._guests[node].open]

    def again(self, step: int) -> Again | None:
        first = self._first_failure()
        left = self._left()
        if self._least is None or self._stopped or len(left) < self._least:
            return None
        if first is None or first["node"] not in self._gone:  # the job itself failed, and would do so again
            return None
        lost = " and ".join(self._name(node) for node in self._hosts if node not in left)
        self._again = Again(0, len(left), f"{self._address}:{free_port(self._address)}", lost, step)
        return self._again

    def go(self) -> None:
        assert self._again is not None
        guests = [self._guests[node] for node in self._left() if node]
        for node, guest in enumerate(guests, 1):
            guest.send(again=asdict(self._again) | {"node": node})
        self._begin_with(guests)
