"""A run may begin several times: resumed by a person, restarted by a scheduler. Who of them may write.

Each beginning is an incarnation, and only the newest one may change the run's directory. Processes of an older one can
still be alive: on a node that a scheduler has given up and that heals later. They find out at their next write.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from launcher.errors import Superseded
from launcher.rundir.files import read_json, write_json
from launcher.rundir.paths import RunPaths

# Where the agent leaves its incarnation for its workers.
INCARNATION = "LAUNCHER_INCARNATION"


@dataclass(frozen=True, order=True)
class Incarnation:
    """``submission``: how often a person has sent the run off before, ``restart``: how often a scheduler has begun
    that submission again; both from 0."""

    submission: int = 0
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.submission}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        submission, _, restart = text.partition(".")
        return cls(int(submission), int(restart))


class Fence:
    """What an incarnation asks before it writes."""

    def __init__(self, paths: RunPaths, own: Incarnation) -> None:
        self.paths, self.own = paths, own

    @classmethod
    def here(cls, paths: RunPaths) -> Fence:
        """Of the incarnation that this worker's agent belongs to."""
        return cls(paths, Incarnation.parse(os.environ.get(INCARNATION, "0.0")))

    def newest(self) -> dict[str, Any]:
        """What the newest incarnation has written of itself; empty before the first."""
        return read_json(self.paths.incarnation) or {}

    @property
    def superseded(self) -> bool:
        """Whether a newer incarnation has begun."""
        return Incarnation.parse(self.newest().get("incarnation", "0.0")) > self.own

    def claim(self, **known: Any) -> None:
        """Begin: from here on older incarnations write nothing. ``known``: what others are to know of this one.

        Raises:
            Superseded: a newer one has begun.
        """
        self.check()
        write_json(self.paths.incarnation, {"incarnation": str(self.own), **known})

    def add(self, **known: Any) -> None:
        """Let others know more of this incarnation.

        Raises:
            Superseded: a newer one has begun.
        """
        self.check()
        write_json(self.paths.incarnation, self.newest() | known)

    def check(self) -> None:
        """Raises Superseded where a newer incarnation has begun."""
        if self.superseded:
            newest = self.newest()["incarnation"]
            raise Superseded(
                f"The run goes on as incarnation {newest}: this is what is left of {self.own}, and writes nothing more."
            )
