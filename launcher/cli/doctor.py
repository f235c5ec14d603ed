"""`launch doctor`: is this machine, or the cluster, fit to run?"""

from __future__ import annotations

import dataclasses
import json
import sys

from launcher.cli.overrides import leaves_in_order, take, with_config
from launcher.config.schema import Config


def doctor(arguments: list[str]) -> int:
    """Exit status 0 where nothing failed, 1 where something did."""
    as_json = take("--json", arguments)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        from launcher.doctor.check import exit_status
        from launcher.doctor.examination import examine
        from launcher.report import live, verdicts

        with leaves_in_order():
            # beside the result, which a script may read
            found = examine(config, lambda line: print(line, file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
        else:
            console = live.console()
            console.print(verdicts.checks_table(found))
            console.print(verdicts.verdict(found), markup=False, highlight=False)
        return exit_status(found)

    return with_config("doctor", arguments, act)
