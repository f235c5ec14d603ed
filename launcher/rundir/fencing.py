"""Fencing: only the newest start of a run may write to its directory.

A run's agents may start several times: resumed by a user, restarted by a scheduler. Each such start is an incarnation.
Processes of an older one can still be alive, for example on a node that the scheduler gave up and that recovers later.
They detect the newer one at their next write. Users see another number: attempts count the starts of the workers, which
torchrun may start several times in one incarnation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from launcher.errors import Superseded
from launcher.rundir.files import read_json, write_json
from launcher.rundir.paths import RunPaths

# environment variable through which the agent passes its incarnation to its workers
INCARNATION = "LAUNCHER_INCARNATION"


@dataclass(frozen=True, order=True)
class Incarnation:
    """Number of one start of a run's agents, both parts from 0.

    Attributes:
        submission: how often users submitted the run before.
        restart: how often a scheduler restarted that submission.
    """

    submission: int = 0
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.submission}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        submission, _, restart = text.partition(".")
        return cls(int(submission), int(restart))


class Fence:
    """Write permission of one incarnation, checked before each write."""

    def __init__(self, paths: RunPaths, own: Incarnation) -> None:
        self.paths, self.own = paths, own

    @classmethod
    def here(cls, paths: RunPaths) -> Fence:
        """Return the fence of this worker's agent."""
        return cls(paths, Incarnation.parse(os.environ.get(INCARNATION, "0.0")))

    def newest(self) -> dict[str, Any]:
        """Return the record of the newest incarnation; empty before the first."""
        return read_json(self.paths.run.newest_incarnation) or {}

    @property
    def superseded(self) -> bool:
        """Return whether a newer one has started."""
        return Incarnation.parse(self.newest().get("incarnation", "0.0")) > self.own

    def claim(self, **fields: Any) -> None:
        """Become the newest one: from here on older ones write nothing.

        Args:
            fields: information for other processes.

        Raises:
            Superseded: a newer one has started.
        """
        self.check()
        write_json(self.paths.run.newest_incarnation, {"incarnation": str(self.own), **fields})

    def add(self, **fields: Any) -> None:
        """Add information about this incarnation for other processes.

        Raises:
            Superseded: a newer one has started.
        """
        self.check()
        write_json(self.paths.run.newest_incarnation, self.newest() | fields)

    def check(self) -> None:
        """Check that no newer one has started.

        Raises:
            Superseded: a newer one has started.
        """
        if self.superseded:
            number = self.newest().get("attempt", "")
            raise Superseded(
                f"A newer start of this run, attempt {number}, has taken over. This earlier one stops writing."
            )
