"""`launch doctor [key=value ...]`: check that this machine, or the cluster, is fit to run jobs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.cli.overrides import print_progress, print_result, signals_as_interrupt, take_flag, with_config
from launcher.config.schema import Config
from launcher.extensions.doctor.check import Check, CheckState
from launcher.quantities import count

FLAGS = ("--json", "--help", "--cfg", "--config-dir", "--config-name")
_HELP = """\
launch doctor [key=value ...] [--json]: checks that this machine, or with cluster=slurm the cluster, is fit to run jobs.

Takes the keys of the groups cluster and run, and train.compile.
Exit status: 0 no check failed; 1 a check failed; 2 the input is wrong.
"""


def launch_doctor(arguments: list[str]) -> int:
    """Check this machine, or the cluster, and print the report; return 0 if no check failed, else 1."""
    as_json = take_flag("--json", arguments)
    if {"--help", "-h"} & set(arguments):
        print(_HELP)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        from launcher.extensions.doctor.check import exit_status
        from launcher.extensions.doctor.examination import examine

        with signals_as_interrupt():
            checks = examine(config, print_progress)
        parts = [checks_table(checks), Text(checks_verdict(checks))]
        print_result([dataclasses.asdict(check) for check in checks], parts, as_json=as_json)
        return exit_status(checks)

    return with_config("doctor", arguments, act)


_CHECK_COLOURS = {CheckState.ok: "green", CheckState.warning: "yellow", CheckState.failure: "red"}


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table with one line per check; below one that is not ok, the remedy."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        where = "" if check.node is None else f"{check.node}: "
        remedy = f"\n-> {check.remedy}" if check.remedy else ""
        table.add_row(
            f"[{_CHECK_COLOURS[check.state]}]{check.state.value}[/]", escape(check.name),
            escape(f"{where}{check.found}{remedy}"),
        )  # fmt: skip
    return table


def checks_verdict(checks: Sequence[Check]) -> str:
    counted = Counter(check.state for check in checks)
    problems = [
        count(counted[state], state.value) for state in (CheckState.failure, CheckState.warning) if counted[state]
    ]
    fit = "Not fit to run" if counted[CheckState.failure] else "Fit to run"
    return f"{fit}: {' and '.join(problems)}." if problems else f"{fit}."
