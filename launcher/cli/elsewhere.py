"""Runs on other machines, and commands that run there, as on the login node that cluster.login names.

A package that reaches them names a subclass of ``Elsewhere`` by the entry point ``launcher.elsewhere``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher.cli.overrides import OnLoginNode
from launcher.errors import EXIT_DONE, UserError
from launcher.targets import load_entry_point, present_entry_points

GROUP = "launcher.elsewhere"


class Elsewhere:
    """Runs on other machines: none, if no package is installed."""

    def run_there(self, there: OnLoginNode, verb: str, arguments: Sequence[str]) -> int:  # noqa: ARG002
        """Run a command on the login node, and return its exit status. ``arguments``: all that were typed."""
        raise UserError("cluster.login: no installed package runs commands there.\n  Leave it out (=null).")

    def require_local(self, word: str, runs: Path) -> None:
        """Check that the run or sweep that ``word`` names is not on a login node.

        Raises:
            OnLoginNode: a login node has it, and this machine does not.
            UserError: there are several.
        """

    def require_local_runs(self, runs: Path) -> None:
        """Check that the runs of a command on all of them, such as `launch top`, are not on a login node.

        Raises:
            OnLoginNode: one login node has runs, and this machine has none.
        """

    def has_runs(self, runs: Path) -> bool:  # noqa: ARG002
        """Return whether other machines may have runs of this directory of runs."""
        return False

    def to_json(self, runs: Path) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the objects of `launch runs --json` there, each with its login node."""
        return []

    def show(self, runs: Path, arguments: Sequence[str]) -> int:  # noqa: ARG002
        """Print the lists of runs there. Return the highest exit status."""
        return EXIT_DONE


@cache
def elsewhere() -> Elsewhere:
    """Return the runs on other machines of the installed package."""
    for name, point in present_entry_points(GROUP).items():
        return load_entry_point(point, f"Entry point {GROUP}, {name}")()
    return Elsewhere()
