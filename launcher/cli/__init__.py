"""`launch COMMAND`: dispatch to a command; a user's mistake becomes one message and exit status 2.

Installed packages add commands by the entry point ``launcher.commands``.
An entry point ``VERB = "package.module:function"`` names a function that takes the arguments and returns the exit
status. Help and completion read the module's text without importing it: the first line of its docstring is
"`launch VERB ARGUMENTS`: summary.", and its constant FLAGS is a tuple of flags.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import launcher
from launcher.cli.overrides import OnLoginNode, discard_output, print_disk_error, print_error
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, LauncherError, SiteError, UserError, did_you_mean
from launcher.process import ENDS_WITH_INPUT, interrupt_at_end_of_input
from launcher.rundir.files import Unreadable
from launcher.targets import entry_points, load_entry_point, module_file

GROUP = "launcher.commands"
_OVERRIDES = ("--help", "--cfg", "--config-dir", "--config-name")
_STARTS, _OF_RUNS = ("--quiet", "--wait"), ("--dir",)
# verb -> module of launcher.cli with its function launch_VERB, the only one that is imported; its flags
_CORE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "train": ("train", ("-m", "--yes", *_STARTS, *_OVERRIDES)),
    "plan": ("plan", ("-m", "--json", *_OVERRIDES)),
    "run": ("train", (*_STARTS, *_OVERRIDES)),
    "runs": ("runs", ("--all", "--json", *_OF_RUNS)),
    "status": ("runs", ("--json", "--watch", *_OF_RUNS)),
    "logs": ("runs", ("--rank", "--node", "--follow", *_OF_RUNS)),
    "cancel": ("runs", _OF_RUNS),
    "resume": ("runs", ("--force", *_STARTS, *_OF_RUNS)),
    "retry": ("runs", ("--failed", *_STARTS, *_OF_RUNS)),
    "mirror": ("runs", _OF_RUNS),
    "keys": ("keys", ("--json", "--schema", "--config-dir")),
}


@dataclass(frozen=True)
class _AddedCommand:
    """Command of an installed package."""

    point: metadata.EntryPoint

    @cached_property
    def _text(self) -> ast.Module:
        try:
            return ast.parse((module_file(self.point.module) or Path()).read_text(encoding="utf-8"))
        except (SiteError, OSError, SyntaxError, ValueError):  # reported when the command runs
            return ast.Module(body=[], type_ignores=[])

    @property
    def help(self) -> tuple[str, str]:
        """Usage and summary."""
        first = (ast.get_docstring(self._text) or "").partition("\n")[0]
        usage, _, summary = first.removeprefix("`").partition("`: ")
        if summary:
            return usage, summary.rstrip(".")
        return f"launch {self.point.name}", f"command of {self.point.value}"

    @property
    def flags(self) -> tuple[str, ...]:
        for node in self._text.body:
            if isinstance(node, ast.Assign) and [getattr(name, "id", "") for name in node.targets] == ["FLAGS"]:
                return tuple(ast.literal_eval(node.value))
        return ()


def _added_commands() -> dict[str, _AddedCommand]:
    """Return the commands of installed packages by their verbs; a verb of the core cannot be replaced."""
    return {verb: _AddedCommand(point) for verb, point in entry_points(GROUP).items() if verb not in _CORE}


def flags() -> dict[str, tuple[str, ...]]:
    """Return the flags of each command."""
    core = {verb: words for verb, (_, words) in _CORE.items()}
    return core | {verb: command.flags for verb, command in _added_commands().items()}


def _command_function(verb: str) -> Callable[[list[str]], int]:
    """Return the function of a command.

    Raises:
        UserError: there is no such command.
        SiteError: the package that adds it cannot be imported.
    """
    if verb in _CORE:
        return getattr(importlib.import_module(f"launcher.cli.{_CORE[verb][0]}"), f"launch_{verb}")
    added = _added_commands()
    if verb not in added:
        verbs = [*_CORE, *added]
        raise UserError(
            f"launch {verb}: there is no such command.\n  {did_you_mean(verb, verbs)}Commands: {', '.join(verbs)}."
        )
    return load_entry_point(added[verb].point, f"launch {verb}")


_HELP = """\
launch: distributed training with an exact global batch.

  launch train [key=value ...]                run or submit a job: the bundled task, or task._target_=my_tasks.MyTask
  launch plan  [key=value ...]                show the job's plan: batch, memory and bytes; starts nothing
  launch run   [key=value ...] -- SCRIPT ...  run any trainer with the cluster options; or -m MODULE, or a COMMAND

  launch runs   [SWEEP]                       list all runs with their states, or the cells of a sweep
  launch status RUN                           show one run: its state, its place, its events, and why it failed
  launch logs   RUN [--rank R] [--follow]     print the output of a rank
  launch cancel RUN                           stop a run; its workers save a checkpoint first
  launch resume RUN   [key=value ...]         resume a run from its newest checkpoint, with these keys changed
  launch retry  RUN                           start a run again from step 0, with the same plan and code
  launch mirror RUN                           send the trackers of a run that has ended what they lack
  launch keys   [WORD ...]                    show the keys: type, default, meaning; task=llama: those of a task
%(added)s
  train, run   --quiet      print nothing but errors           --wait         with cluster=slurm: wait for the end
  train        -m           a sweep: one run for each combination of key=1,2,4     --yes    also very many
  plan         -m           rank the combinations of key=1,2,4 (key=all: all that are possible)
  plan         --json       the plan or the ranking as JSON
  resume       --force      allow changes of keys that affect what is learned
  retry        --failed     of a sweep, the failed runs: the default
  RUN          a run's name, its directory, or a prefix of its name; --dir DIR: directory of the runs (default: runs)
  runs, status --json       for scripts
  status       --watch      show it until it is over; exit status: that of the run
  keys         --json       for scripts                        --schema [GROUP]   JSON schema of config files
               --config-dir DIR   directory with your own options
  overrides    --help       the config's groups and values     --cfg job      the composed config
               --config-dir DIR   directory with your own config files
  cluster.login=USER@HOST      train, run, plan, drill and doctor on that login node; RUN is found there, too
  launch --version
  launch COMMAND --help     more about a command

Exit status: 0 done; 1 the job failed; 2 the input is wrong; 75 stopped from outside, resumable; 130 stopped by Ctrl-C.
"""


def help_text() -> str:
    """Return the text of `launch --help`, with the commands of installed packages."""
    lines = [f"  {usage:<42}  {summary}\n" for usage, summary in (each.help for each in _added_commands().values())]
    return _HELP % {"added": "".join(lines)}


def main() -> None:
    try:
        if os.environ.pop(ENDS_WITH_INPUT, None):
            interrupt_at_end_of_input()
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        status = discard_output()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one `launch` command and return its exit status."""
    return status_or_error(lambda: _dispatch(list(arguments)))


def status_or_error(act: Callable[[], int]) -> int:
    """Return the result of ``act``; if it raises an error, print that and return its exit status."""
    try:
        return act()
    except LauncherError as error:
        return print_error(error)
    except Unreadable as error:
        return print_error(UserError(f"{error}.\n  Restore the file from a copy, or remove it."))
    except BrokenPipeError:
        raise
    except OSError as error:
        return print_disk_error(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return EXIT_DONE if arguments else EXIT_USER
    verb, *rest = arguments
    if verb == "--version":
        print(launcher.__version__)
        return EXIT_DONE
    function = _command_function(verb)
    try:
        return function(list(rest))
    except OnLoginNode as there:
        from launcher.cli.elsewhere import elsewhere

        return elsewhere().run_there(there, verb, rest)
