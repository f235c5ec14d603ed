"""`launch doctor`: check that this machine, or the cluster, is fit to run jobs."""

from __future__ import annotations

import dataclasses
import json
import sys

from launcher.cli.overrides import leaves_in_order, take, with_config
from launcher.config.schema import Config


def doctor(arguments: list[str]) -> int:
    """Return exit status 0 if no check failed, else 1."""
    as_json = take("--json", arguments)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        from launcher.doctor.check import exit_status
        from launcher.doctor.examination import examine
        from launcher.report import live, verdicts

        with leaves_in_order():
            # progress goes to stderr, because a script may read the result
            checks = examine(config, lambda line: print(line, file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        else:
            console = live.console()
            console.print(verdicts.checks_table(checks))
            console.print(verdicts.checks_verdict(checks), markup=False, highlight=False)
        return exit_status(checks)

    return with_config("doctor", arguments, act)
