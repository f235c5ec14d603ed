"""What the doctor found, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from launcher.check import Check, State

_COLOURS = {State.ok: "green", State.warning: "yellow", State.failure: "red"}


def checks_table(checks: Sequence[Check]) -> Table:
    """A line a check; below one that is not ok, the remedy."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        where = "" if check.node is None else f"{check.node}: "
        remedy = f"\n-> {check.remedy}" if check.remedy else ""
        table.add_row(
            f"[{_COLOURS[check.state]}]{check.state.value}[/]", escape(check.name),
            escape(f"{where}{check.found}{remedy}"),
        )  # fmt: skip
    return table


def verdict(checks: Sequence[Check]) -> str:
    counted = Counter(check.state for check in checks)
    said = [
        f"{counted[state]} {state.value}{'' if counted[state] == 1 else 's'}"
        for state in (State.failure, State.warning)
        if counted[state]
    ]
    fit = "Not fit to run" if counted[State.failure] else "Fit to run"
    return f"{fit}: {' and '.join(said)}." if said else f"{fit}."
