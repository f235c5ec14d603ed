"""Commands with key=value overrides: parsing by Hydra, and one message for a user's mistake."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from launcher.config.choices import ClusterKind
from launcher.config.foreign_keys import translation
from launcher.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    LauncherError,
    RecordFailed,
    UserError,
    did_you_mean,
)
from launcher.plan.clusters import require_at_hand
from launcher.process import signal_handler
from launcher.quantities import printable
from launcher.report import live

if TYPE_CHECKING:
    from rich.console import RenderableType

    from launcher.config.multirun import RequestedCell, Result
    from launcher.config.schema import Config


# Hydra's flags -> whether a value follows
_HYDRA_FLAGS = {
    "--help": False, "-h": False, "--hydra-help": False, "--resolve": False, "--run": False, "-r": False,
    "--multirun": False, "-m": False, "--cfg": True, "-c": True, "--package": True, "-p": True,
    "--info": True, "-i": True, "--config-name": True, "-cn": True, "--config-dir": True, "-cd": True,
    "--config-path": True, "-cp": True,
}  # fmt: skip
_OWN_FLAGS = ("--quiet", "--json", "--wait", "--yes")


class OnLoginNode(Exception):
    """Raised by a command that is to run on a login node: ``launcher.cli.elsewhere`` does that.

    Attributes:
        target: the command's config, which names the login node; or a function that runs a command on runs, given its
            name and all of its arguments, and returns its exit status.
    """

    def __init__(self, target: Config | Callable[[str, Sequence[str]], int]) -> None:
        super().__init__()
        self.target = target


def print_error(error: LauncherError) -> int:
    print(printable(f"launch: error: {error}"), file=sys.stderr)
    return error.exit_status


def print_disk_error(error: OSError) -> int:
    """Report a full or read-only disk; raise any other error again, because it is a bug."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        raise error
    where = error.filename or "a disk of the run"
    return print_error(RecordFailed(f"{where}: {error.strerror}.\n  Free some space there, or choose another run.dir."))


def discard_output() -> int:
    """Discard further output after the reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


def take_flag(flag: str, arguments: list[str]) -> bool:
    """Remove ``flag``, which is this program's and not Hydra's; return whether it was present."""
    present = flag in arguments
    arguments[:] = [argument for argument in arguments if argument != flag]
    return present


def take_value(flag: str, arguments: list[str], kind: str = "N") -> str | None:
    """Remove ``flag VALUE`` or ``flag=VALUE``; return the value, None if absent.

    Args:
        kind: what the value is, for the message.

    Raises:
        UserError: it has no value.
    """
    for at, argument in enumerate(arguments):
        name, is_joined, value = argument.partition("=")
        if name == flag:
            if not is_joined and at + 1 == len(arguments):
                raise UserError(f"{flag}: has no value.\n  Write {flag} {kind}.")
            value = value if is_joined else arguments[at + 1]
            del arguments[at : at + (1 if is_joined else 2)]
            return value
    return None


def flags_first(arguments: list[str]) -> list[str]:
    """Return the arguments with Hydra's flags before all overrides; its parser refuses flags between overrides.

    Raises:
        UserError: an argument is neither a flag nor ``key=value``, or a flag lacks its value.
    """
    flags: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag = argument.partition("=")[0]
        if not argument.startswith("-"):
            if "=" not in argument and not argument.startswith("~"):
                raise UserError(f"{argument}: is not an override.\n  Write key=value, such as train.steps=100.")
            overrides.append(argument)
            continue
        if flag not in _HYDRA_FLAGS:
            if remedy := translation(flag):
                raise UserError(f"{flag}: there is no such flag.\n  {remedy}")
            if (value := next(remaining, "")) and "=" not in value and not value.startswith("-"):
                raise UserError(
                    f"{flag}: there is no such flag.\n  The job's options are written key=value, such as "
                    "train.steps=100."
                )
            names = [*_OWN_FLAGS, *(name for name in _HYDRA_FLAGS if name.startswith("--"))]
            raise UserError(f"{flag}: there is no such flag.\n  {did_you_mean(flag, names)}See `launch --help`.")
        flags.append(argument)
        if _HYDRA_FLAGS[flag] and flag == argument and (value := next(remaining, None)) is not None:
            flags.append(value)
        elif _HYDRA_FLAGS[flag] and flag == argument and flag not in ("--info", "-i"):
            raise UserError(f"{flag}: has no value.\n  Write {flag} VALUE.")
    return [*flags, *overrides]


def with_config(
    verb: str, arguments: list[str], act: Callable[[Config, str], int], *, on_login_node: bool = True, **sweep: Any
) -> int:
    """Call ``act`` with the config composed from ``arguments``.

    Args:
        on_login_node: whether the command runs on the login node that cluster.login names.
        sweep: handling of -m, see `launcher.config.hydra.run_with_config`.

    Raises:
        OnLoginNode: the config says so.
    """
    from launcher.config.hydra import run_with_config
    from launcher.launch.outer_job import require_one_copy

    words = sys.argv[1:]  # Hydra's application replaces them for -m
    arguments = flags_first(arguments)

    def check(config: Config) -> None:
        if verb != "plan":
            require_one_copy(config.cluster.kind, words)
        if on_login_node:
            _leave_for_login_node(config)

    def act_or_explain(config: Config, yaml: str) -> int:
        try:
            check(config)
            if verb != "plan":
                require_at_hand(config.cluster)
            status = act(config, yaml)
        except LauncherError as error:  # of one cell of -m, as a full disk; the others follow
            return print_error(error)
        except OSError as error:
            return print_disk_error(error)
        if status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # also skips the sweep's remaining cells
        return status

    if "cells" in sweep:
        begin = sweep["cells"]

        def begin_here(requested: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
            check(requested[0].config)
            return begin(requested, with_results)

        sweep["cells"] = begin_here
    return run_with_config(verb, arguments, act_or_explain, **sweep)


def _leave_for_login_node(config: Config) -> None:
    """Raise OnLoginNode if a command is to run on a login node; ConfigError if that is not possible."""
    cluster = config.cluster
    if cluster.login is None:
        return
    if cluster.kind != ClusterKind.slurm:
        raise ConfigError(
            "cluster.login", cluster.login, f"has no effect with cluster={cluster.kind}.",
            "It submits jobs to Slurm from another machine: add cluster=slurm.",
        )  # fmt: skip
    raise OnLoginNode(config)


def signals_as_interrupt() -> AbstractContextManager[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that everything started is ended and no job is left behind."""
    return signal_handler((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # stderr, because a script may read the result


def print_result(fields: Any, parts: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print a result: ``fields`` as JSON, or ``parts`` for a reader."""
    if as_json:
        print(json.dumps(fields, indent=2))
        return
    console = live.console()
    for part in parts:
        console.print(part)
