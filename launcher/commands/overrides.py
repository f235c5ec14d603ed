"""Verbs that take key=value overrides: Hydra reads them, and a user's mistake becomes one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launcher.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError, did_you_mean

if TYPE_CHECKING:
    from launcher.config import Config

# Hydra's, by whether a value follows
_HYDRA_FLAGS = {
    "--help": False, "-h": False, "--hydra-help": False, "--resolve": False, "--run": False, "-r": False,
    "--multirun": False, "-m": False, "--cfg": True, "-c": True, "--package": True, "-p": True,
    "--info": True, "-i": True, "--config-name": True, "-cn": True, "--config-dir": True, "-cd": True,
    "--config-path": True, "-cp": True,
}  # fmt: skip
_OWN_FLAGS = ("--quiet", "--json", "--wait", "--yes")


def explain(error: UserError) -> int:
    print(f"launch: error: {error}", file=sys.stderr)
    return error.exit_status


def nobody_reads() -> int:
    """Whoever was reading has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


def take(flag: str, arguments: list[str]) -> bool:
    """Remove ``flag``, which is this program's and not Hydra's; whether it was there."""
    there = flag in arguments
    arguments[:] = [argument for argument in arguments if argument != flag]
    return there


def require_overrides(arguments: list[str]) -> None:
    """Everything that is not a flag is ``key=value``; said here, in words that name the flag or the word."""
    left = iter(arguments)
    for argument in left:
        flag = argument.partition("=")[0]
        if argument.startswith("-"):
            if flag not in _HYDRA_FLAGS:
                known = [*_OWN_FLAGS, *(name for name in _HYDRA_FLAGS if name.startswith("--"))]
                raise UserError(
                    f"{flag}: there is no such flag here.\n  {did_you_mean(flag, known)}See `launch --help`."
                )
            if _HYDRA_FLAGS[flag] and flag == argument:
                next(left, None)
        elif "=" not in argument and not argument.startswith("~"):
            raise UserError(f"{argument}: is no override.\n  Write key=value, such as train.steps=100.")


def with_config(verb: str, arguments: list[str], act: Callable[[Config, str], int], **sweep: Any) -> int:
    """``sweep``: what -m does, as of `launcher.compose.run_with_config`."""
    from launcher.compose import run_with_config

    require_overrides(arguments)

    def act_or_explain(config: Config, yaml: str) -> int:
        try:
            status = act(config, yaml)
        except UserError as error:
            return explain(error)
        except BrokenPipeError:  # here, or Hydra makes an error message of it
            return nobody_reads()
        if status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # of a sweep, the cells that have not begun are left out too
        return status

    return run_with_config(verb, arguments, act_or_explain, **sweep)
