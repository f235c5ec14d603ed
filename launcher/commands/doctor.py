"""`launch doctor`: is this machine, or the cluster, fit to run?"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager

from launcher.commands.overrides import take, with_config
from launcher.config import Config


def doctor(arguments: list[str]) -> int:
    """Exit status 0 where nothing failed, 1 where something did."""
    as_json = take("--json", arguments)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        from launcher.check import exit_status
        from launcher.doctor.examine import examine
        from launcher.report import checks, terminal

        with _leaves_in_order():
            # beside the result, which a script may read
            found = examine(config, lambda line: print(line, file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
        else:
            console = terminal.console()
            console.print(checks.checks_table(found))
            console.print(checks.verdict(found), markup=False, highlight=False)
        return exit_status(found)

    return with_config("doctor", arguments, act)


@contextmanager
def _leaves_in_order() -> Generator[None]:
    """A signal to end is a Ctrl-C: no job and no directory is left behind."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
