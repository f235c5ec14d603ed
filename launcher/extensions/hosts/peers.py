"""The other hosts of a running job: who stopped it, who failed first, who is gone, and the verdict.

The `launch` processes form a star: each keeps the connection over which it joined node 0. Training uses torch's own
connections, and so do the agents. torch's store cannot replace these: it does not report that a client is gone, and it
would make `launch` import torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from launcher.extensions.hosts.channel import LOST_AFTER_S, Channel, Listener, Message, wait
from launcher.launch.network import free_port
from launcher.plan.clusters import Peers, Regrouping
from launcher.quantities import count
from launcher.rundir.job_end import LOST_PEER, Summary, failed_summary, failure_record

# seconds by which a reset connection may be noticed later here than by the workers that were connected to that host
_RESET_MARGIN_S = 2.0


@dataclass(frozen=True)
class Result:
    """Result of one host. ``when``: time of its failure, else of its end, on node 0's monotonic clock (seconds)."""

    summary: Summary
    when: float


def seconds_since_failure(summary: Summary) -> float:
    """Return the seconds since the failure in ``summary`` by this host's clock; 0 if its time is unknown."""
    reported: Summary = summary.get("failure") or {}
    at = reported.get("at")
    return 0.0 if at is None else (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def lost_host(node: int, channel: Channel) -> Summary:
    """Return the failure record of a host that is gone, which could not report one itself."""
    why = f"no answer for {LOST_AFTER_S} s" if channel.silent else "its `launch` was killed, or the host was shut down"
    record = failure_record(f"node {node} ({channel.peer}) is gone: {why}", None)
    return record | {"node": node, "host": channel.peer}


class OtherHost(Peers):
    """Peers of nodes 1 and up, which are connected to node 0 only."""

    def __init__(self, first: Channel) -> None:
        super().__init__()
        self._first = first
        self._verdict: Summary | None = None
        self._regrouping: Regrouping | None = None

    def listen(self, seconds: float) -> None:
        if not self._first.open:
            time.sleep(seconds)
            return
        wait([self._first], seconds)
        for message in self._first.receive():
            if "stop" in message:
                self._stopped, self.stopped_by = True, message["stop"]
            elif "trouble" in message:
                self.trouble, self.lost = self.trouble or message["trouble"], self.lost or message["lost"]
            elif "regroup" in message:  # later messages belong to the next attempt
                self._regrouping = Regrouping(**message["regroup"])
                self._reset()
            elif "verdict" in message:
                self._verdict = message["verdict"]
        if not self._first.open and self._verdict is None:
            self.trouble, self.lost = f"node 0 ({self._first.peer}) is gone", True

    def stop(self, by: str) -> None:
        self._stopped = True
        self._first.send(stop=by)

    def ended(self, summary: Summary) -> None:
        self._first.send(ended=True, summary=summary, ago_s=seconds_since_failure(summary))

    def complete(self) -> bool:
        return self._verdict is not None or self._regrouping is not None or not self._first.open

    def regroup(self) -> Regrouping | None:
        regrouping, self._regrouping = self._regrouping, None
        return regrouping

    def conclude(self) -> Summary:
        self._first.close()
        if self._verdict is not None:
            return self._verdict
        return {"verdict": "killed"} if self._stopped else failed_summary(lost_host(0, self._first))


class FirstHost(Peers):
    """Peers of node 0, which receives messages from all other hosts and forwards them."""

    def __init__(
        self, listener: Listener, channels: Sequence[Channel], address: str, refusal: str, least: int | None = None
    ) -> None:
        """Create the peers of node 0.

        Args:
            channels: connections to nodes 1, 2, ...
            refusal: message for a host that comes too late.
            least: smallest number of hosts with which the job continues when one is lost; None: the job ends.
        """
        super().__init__()
        self._listener, self._address, self._refusal, self._least = listener, address, refusal, least
        self._connect(channels)

    def _connect(self, channels: Sequence[Channel]) -> None:
        """Start an attempt of the job with these hosts as nodes 1, 2, ..."""
        self._reset()
        self._channels = dict(enumerate(channels, 1))
        self._addresses = {0: self._address} | {node: channel.peer for node, channel in self._channels.items()}
        self._results: dict[int, Result] = {}
        self._gone: dict[int, float] = {}
        self._regrouping: Regrouping | None = None
        self._cause = ""

    def listen(self, seconds: float) -> None:
        wait([*self._listener.sources(), *(channel for channel in self._channels.values() if channel.open)], seconds)
        for channel, _ in self._listener.arrivals():
            channel.send(refused=self._refusal)
            channel.close()
        for node, channel in self._channels.items():
            for message in channel.receive():
                self._handle(node, message)
            if not channel.open and node not in self._results and node not in self._gone:
                self._gone[node] = time.monotonic()
                self.lost = True
                self._report_trouble(f"{self._name(node)} is gone", node)

    def _handle(self, node: int, message: Message) -> None:
        if "stop" in message:
            self._stopped, self._cause = True, message["stop"]
            self.stopped_by = self._name(node)
            self._send_all_but(node, stop=self.stopped_by)
        elif "ended" in message:
            self._add(node, message["summary"], message["ago_s"])

    def _add(self, node: int, summary: Summary, ago_s: float) -> None:
        self._results[node] = Result(summary, time.monotonic() - ago_s)
        if "failure" in summary and not self._stopped:
            self._report_trouble(f"the job failed on {self._name(node)}", node)

    def _report_trouble(self, text: str, node: int) -> None:
        if node:
            self.trouble = self.trouble or text
        self._send_all_but(node, trouble=text, lost=self.lost)

    def _send_all_but(self, excluded: int, **message: Any) -> None:
        for node, channel in self._channels.items():
            if node != excluded:
                channel.send(**message)

    def _name(self, node: int) -> str:
        return f"node {node} ({self._addresses[node]})"

    def stop(self, by: str) -> None:
        self._stopped, self._cause = True, by
        self._send_all_but(0, stop=self._name(0))

    def ended(self, summary: Summary) -> None:
        self._add(0, summary, seconds_since_failure(summary))

    def complete(self) -> bool:
        return self._results.keys() | self._gone.keys() == self._addresses.keys()

    def conclude(self) -> Summary:
        summary = self._verdict()
        self._send_all_but(0, verdict=summary)
        for connection in (self._listener, *self._channels.values()):
            connection.close()
        return summary

    def _verdict(self) -> Summary:
        own = dict(self._results[0].summary)
        first = self._first_failure()
        if self._stopped or first is None:
            if own.pop("failure", None) is not None:
                own["verdict"] = "killed"
            if self._stopped and own.get("verdict") != "done":  # the workers here know only the SIGTERM of their agent
                own["stopped_by"] = self._cause
            return own
        own.pop("stopped_by", None)  # this launcher stopped the workers because of ``first``
        if first["node"] in self._gone and self._least is not None:  # with enough hosts the job would have continued
            left = len(self._left())
            few = f"{count(left, 'host')} {'is' if left == 1 else 'are'} left, and cluster.nodes has {self._least}"
            first = first | {"error": f"{first['error']}; {few} at least"}
        return own | failed_summary(first)

    def _first_failure(self) -> Summary | None:
        """Return the failure of the host that failed first, or None.

        A host may be gone for a while before that is noticed, and a report takes time to arrive: a host whose ranks
        lost a peer counts as later than every other.
        """
        failures: list[tuple[float, Summary]] = []
        for node, result in self._results.items():
            if (reported := result.summary.get("failure")) is not None:
                failures.append((result.when, reported | {"node": node, "host": self._addresses[node]}))
        for node, when in self._gone.items():
            unnoticed = LOST_AFTER_S if self._channels[node].silent else _RESET_MARGIN_S
            failures.append((when - unnoticed, lost_host(node, self._channels[node])))
        return min(failures, key=lambda entry: (entry[1].get("kind") == LOST_PEER, entry[0]))[1] if failures else None

    def _left(self) -> list[int]:
        """Return the hosts that can still be reached; one may have gone after its workers had ended."""
        return [node for node in self._addresses if not node or self._channels[node].open]

    def regroup(self) -> Regrouping | None:
        first, left = self._first_failure(), self._left()
        if self._least is None or self._stopped or len(left) < self._least:
            return None
        if first is None or first["node"] not in self._gone:  # the job itself failed, and would fail again
            return None
        lost = " and ".join(self._name(node) for node in self._addresses if node not in left)
        self._regrouping = Regrouping(0, len(left), f"{self._address}:{free_port(self._address)}", lost)
        return self._regrouping

    def start_regrouped(self) -> None:
        assert self._regrouping is not None
        channels = [self._channels[node] for node in self._left() if node]
        for node, channel in enumerate(channels, 1):
            channel.send(regroup=asdict(self._regrouping) | {"node": node})
        self._connect(channels)
