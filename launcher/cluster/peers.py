"""The other hosts of a running job: who stopped it, who failed first, who is gone, and the one verdict in the end.

A star: every host keeps the connection over which it met node 0. Nothing here takes part in training; torch's own
connections carry that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from launcher.cluster.blame import Summary, lost_host, seconds_since_failure
from launcher.cluster.channel import Channel, wait
from launcher.errors import EXIT_FAILED, EXIT_INTERRUPTED


class Peers(Protocol):
    """``stopped_by``: which other host was told to stop, once one was. ``trouble``: what ended the job elsewhere;
    ``lost``: that a host is gone, for which no worker needs to be waited."""

    stopped_by: str | None
    trouble: str | None
    lost: bool

    def listen(self, seconds: float) -> None:
        """Take in what the others say, for so long at most."""
        ...

    def stop(self) -> None:
        """Someone stopped the job on this host."""
        ...

    def ended(self, status: int, summary: Summary) -> None:
        """This host's agent has ended."""
        ...

    def complete(self) -> bool:
        """Whether the verdict of the whole job is known."""
        ...

    def again(self, step: int) -> Again | None:
        """Once that is so: how this host goes on, where another one is gone and enough are left; None where the job is
        over. ``step``: optimizer steps in the newest checkpoint, which node 0 tells the others."""
        ...

    def go(self) -> None:
        """All is ready for that: node 0 has the others begin."""
        ...

    def conclude(self) -> tuple[int, Summary]:
        """The exit status and the summary of the whole job, as far as they are known; the connections end."""
        ...


class Alone:
    """A local job."""

    stopped_by: str | None = None
    trouble: str | None = None
    lost = False

    def __init__(self) -> None:
        self._own: tuple[int, Summary] = (EXIT_FAILED, {})

    def listen(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop(self) -> None: ...

    def ended(self, status: int, summary: Summary) -> None:
        self._own = (status, summary)

    def complete(self) -> bool:
        return True

    def again(self, step: int) -> Again | None: ...

    def go(self) -> None: ...

    def conclude(self) -> tuple[int, Summary]:
        return self._own


@dataclass(frozen=True)
class Again:
    """How this host goes on without those that are gone. ``node``: its number from here on; ``nodes``: hosts;
    ``store``: HOST:PORT where their agents share what they know; ``lost``: who is gone, by the old numbers; ``step``:
    optimizer steps in the newest checkpoint."""

    node: int
    nodes: int
    store: str
    lost: str
    step: int


class OtherHost:
    """Node 1 and up: hears from node 0 alone."""

    def __init__(self, first: Channel) -> None:
        self._first = first
        self._own: tuple[int, Summary] = (EXIT_FAILED, {})
        self._final: tuple[int, Summary] | None = None
        self._again: Again | None = None
        self._stopped = False
        self.stopped_by: str | None = None
        self.trouble: str | None = None
        self.lost = False

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
            elif "again" in message:  # what comes after it is of the new start
                self._again = Again(**message["again"])
                self._stopped, self.stopped_by, self.trouble, self.lost = False, None, None, False
            elif "verdict" in message:
                self._final = message["status"], message["verdict"]
        if not self._first.open and self._final is None:
            self.trouble, self.lost = f"node 0 ({self._first.peer}) is gone", True

    def stop(self) -> None:
        self._stopped = True
        self._first.send(stop=True)

    def ended(self, status: int, summary: Summary) -> None:
        self._own = status, summary
        self._first.send(ended=True, status=status, summary=summary, ago_s=seconds_since_failure(summary))

    def complete(self) -> bool:
        return self._final is not None or self._again is not None or not self._first.open

    def again(self, step: int) -> Again | None:  # noqa: ARG002
        again, self._again = self._again, None
        return again

    def go(self) -> None: ...

    def conclude(self) -> tuple[int, Summary]:
        self._first.close()
        if self._final is not None:
            return self._final
        if self._stopped:
            return EXIT_INTERRUPTED, {"verdict": "killed"}
        return EXIT_FAILED, {"verdict": "failed", "failure": lost_host(0, self._first)}
