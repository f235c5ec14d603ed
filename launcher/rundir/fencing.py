"""Fencing: only the newest start of a run may write to its directory.

A run may start several times: resumed by a user, restarted by a scheduler. Each start is an attempt. (Within an attempt
torchrun may start the workers again; their logs are numbered by these starts.) Processes of an older attempt can still
be alive, for example on a node that the scheduler gave up and that recovers later. They detect the newer attempt at
their next write.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from launcher.errors import Superseded
from launcher.rundir.files import read_json, write_json
from launcher.rundir.paths import RunPaths

# Environment variable through which the agent passes its attempt to its workers. Files and variables are named by an
# older word for it, so that jobs and files of earlier versions stay readable.
ATTEMPT = "LAUNCHER_INCARNATION"


@dataclass(frozen=True, order=True)
class Attempt:
    """Number of a run's attempt, both parts from 0.

    Attributes:
        submission: how often users submitted the run before.
        restart: how often a scheduler restarted that submission.
    """

    submission: int = 0
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.submission}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        submission, _, restart = text.partition(".")
        return cls(int(submission), int(restart))


class Fence:
    """Write permission of one attempt, checked before each write."""

    def __init__(self, paths: RunPaths, own: Attempt) -> None:
        self.paths, self.own = paths, own

    @classmethod
    def here(cls, paths: RunPaths) -> Fence:
        """Return the fence of the attempt of this worker's agent."""
        return cls(paths, Attempt.parse(os.environ.get(ATTEMPT, "0.0")))

    def newest(self) -> dict[str, Any]:
        """Return the record of the newest attempt; empty before the first."""
        return read_json(self.paths.run.newest_attempt) or {}

    @property
    def superseded(self) -> bool:
        """Return whether a newer attempt has started."""
        return Attempt.parse(self.newest().get("incarnation", "0.0")) > self.own

    def claim(self, **fields: Any) -> None:
        """Become the newest attempt: from here on older ones write nothing.

        Args:
            fields: information for other processes.

        Raises:
            Superseded: a newer one has started.
        """
        self.check()
        write_json(self.paths.run.newest_attempt, {"incarnation": str(self.own), **fields})

    def add(self, **fields: Any) -> None:
        """Add information about this attempt for other processes.

        Raises:
            Superseded: a newer one has started.
        """
        self.check()
        write_json(self.paths.run.newest_attempt, self.newest() | fields)

    def check(self) -> None:
        """Check that no newer attempt has started.

        Raises:
            Superseded: a newer one has started.
        """
        if self.superseded:
            newest = self.newest()["incarnation"]
            raise Superseded(
                f"A newer start of this run ({newest}, SUBMISSION.RESTART) has taken over. "
                f"This process belongs to start {self.own} and stops writing."
            )
