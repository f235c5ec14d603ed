"""`launch top`: show all runs, live: progress, loss, logs; cancel and resume them."""

from __future__ import annotations

import sys

from launcher.cli.elsewhere import elsewhere
from launcher.cli.names import command_parser
from launcher.errors import EXIT_DONE, UserError

FLAGS = ("--dir",)


def launch_top(arguments: list[str]) -> int:
    does = "Show all runs, live: l logs, c cancel, r resume, q quit."
    options = command_parser("top", does, run=False).parse_args(arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("launch top: needs a terminal.\n  For scripts: launch runs --json.")
    elsewhere().require_local_runs(options.dir)
    from launcher.extensions.top.top import Top

    Top(options.dir).run()
    return EXIT_DONE
