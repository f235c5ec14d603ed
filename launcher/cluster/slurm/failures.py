"""Who failed first on the nodes of a job, and whether anybody did: a lost node looks like a failure to its peers."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

from launcher.cluster.failure import HANG, Failure
from launcher.cluster.slurm import client
from launcher.errors import SiteError
from launcher.incarnation import Fence
from launcher.paths import read_json, write_json

_LOOK_EVERY_S = 1.0
# beside the time after which Slurm itself gives a silent node up
_SLURM_ACTS_WITHIN_S = 60
_SLURMD_TIMEOUT_S = 300  # Slurm's default
# the words for a peer that is gone
_CONNECTION = re.compile(
    r"onnection (was |has been )?(closed|reset|aborted|refused|lost)|Broken pipe|[Ss]ocket [Tt]imeout|[Tt]imed out|"
    r"recvValue failed|remote worker|NCCL|DistBackendError|DistNetworkError|DistStoreError|did not come together"
)
# and what only torch's own connections say or run through: a user's code has connections too
_OF_TORCH = re.compile(
    r"gloo|NCCL|c10d|TCPStore|Dist(Backend|Network|Store)Error|torch/distributed/|did not come together"
)
_LOG_TAIL_BYTES = 8192


class Reports:
    """What the nodes of one incarnation say of their failures, in files of the run's directory."""

    def __init__(self, fence: Fence, node: int, nodes: int) -> None:
        self._fence, self._node, self._nodes = fence, node, nodes

    def add(self, failure: Failure) -> None:
        """Say how this node's workers failed. The run's summary has the earliest failure that any node told."""
        paths = self._fence.paths
        own = failure | {"node": self._node, "host": socket.gethostname()}
        self._fence.check()
        write_json(paths.failure_of(self._node), {"incarnation": str(self._fence.own), "failure": own})
        told: dict[int, Failure] = {}
        while (now := self.all()) != told:  # another node may have added its own while this one wrote
            told = now
            first = min(told.values(), key=lambda failure: failure.get("at", "~"))
            write_json(paths.summary, (read_json(paths.summary) or {}) | {"verdict": "failed", "failure": first})

    def all(self) -> dict[int, Failure]:
        """By the node's number."""
        found: dict[int, Failure] = {}
        for node in range(self._nodes):
            said = read_json(self._fence.paths.failure_of(node)) or {}
            if said.get("incarnation") == str(self._fence.own):
                found[node] = said["failure"]
        return found

    def of_connections_only(self) -> bool:
        """Whether every node that failed has only lost its peers, or some of them: then none of them is the cause."""
        return self._nodes > 1 and all(map(lost_its_peers, self.all().values()))

    def wait_for_slurm(self, job: str, *, can_ask: bool = True) -> bool:
        """Wait for Slurm to find a node gone: it then begins the job again, and ends this process.

        Returns whether this node is to have it begun again instead: all nodes are there, and lost each other, or one
        says nothing and Slurm does not mind. False where a node has told the cause, or Slurm is at it, or would have
        been: not ``can_ask``.

        Raises:
            Superseded: the job goes on elsewhere.
        """
        end = time.monotonic() + _slurmd_timeout_s() + _SLURM_ACTS_WITHIN_S
        while True:
            self._fence.check()
            if not self.of_connections_only():
                return False
            if not can_ask and time.monotonic() > end:
                return False
            state = _state(job) if can_ask else None
            if state is not None:
                if state != "RUNNING":  # Slurm has ended the job, or is about to
                    return False
                told = self.all()
                if len(told) == self._nodes or time.monotonic() > end:
                    return self._node == min(told)
            time.sleep(_LOOK_EVERY_S)


def lost_its_peers(failure: Failure) -> bool:
    """Whether this is what a rank says whose peer is gone, and not an error of its own."""
    said = str(failure["error"])
    if failure["kind"] == HANG:  # the stack of whoever waits has torch's words in it
        return False
    if said == "killed by SIGABRT":  # NCCL's watchdog ends the process; why is in its log
        said += _tail(failure["log"])
    return bool(_CONNECTION.search(said) and _OF_TORCH.search(said + str(failure["traceback"] or "")))


def _tail(log: str | None) -> str:
    try:
        return Path(log or "").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""


def _slurmd_timeout_s() -> int:
    try:
        said = re.match(r"\d+", client.setting("SlurmdTimeout") or "")
    except SiteError:
        said = None
    return int(said[0]) if said else _SLURMD_TIMEOUT_S


def _state(job: str) -> str | None:
    """Slurm's state of the job; None where Slurm does not answer: then this node may be the one that is cut off."""
    try:
        found = client.job(job)
    except SiteError:
        return None
    return None if found is None else found.state
