"""How the hosts tell each other, and the doctor, what they found: a file a host in a directory that all must see.

That it works is itself what a run needs: the plan, the checkpoints and the logs go the same way.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from launcher.paths import read_json, write_json

_LOOK_EVERY_S = 0.1

# what one host says, by subject: plain values that travel as JSON
Answer = dict[str, Any]


def question_of(folder: Path) -> Path:
    return folder / "question.json"


def answers(folder: Path, nodes: int) -> dict[int, Answer]:
    """What each host has said so far; those that have said nothing are left out."""
    list(folder.iterdir())  # of a directory on a network a fresh look, not what was remembered of it
    found = {node: read_json(_answer_of(folder, node)) for node in range(nodes)}
    return {node: answer for node, answer in found.items() if answer is not None}


def _answer_of(folder: Path, node: int) -> Path:
    return folder / f"node{node}.json"


class Desk:
    """One host's place among the others."""

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self.folder, self.node, self.nodes = folder, node, nodes
        self._told: Answer = {}

    def tell(self, **known: Any) -> None:
        """Something more is known of this host."""
        self._told |= known
        write_json(_answer_of(self.folder, self.node), self._told)

    def wait(self, key: str, of: set[int], within_s: float) -> dict[int, Answer]:
        """The answers of those hosts that have told ``key``, once all have, or are done without, or time is over."""
        end = time.monotonic() + within_s
        while True:
            found = {node: answer for node, answer in answers(self.folder, self.nodes).items() if node in of}
            known = {node: answer for node, answer in found.items() if key in answer}
            over = {node for node, answer in found.items() if answer.get("done")}
            if known.keys() | over >= of or time.monotonic() > end:
                return known
            time.sleep(_LOOK_EVERY_S)
