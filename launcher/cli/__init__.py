"""`launch COMMAND`: dispatch to a command; a user's mistake becomes one message and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata

from launcher.cli.commands import added_commands, command_function
from launcher.cli.overrides import OnLoginNode, discard_output, print_disk_error, print_error
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, LauncherError, UserError
from launcher.process import ENDS_WITH_INPUT, interrupt_at_end_of_input
from launcher.rundir.files import Unreadable

_HELP = """\
launch: distributed training with an exact global batch.

  launch train [key=value ...]                run or submit a job: the bundled task, or task._target_=my_tasks.MyTask
  launch plan  [key=value ...]                show the job's plan: batch, memory and bytes; starts nothing
  launch run   [key=value ...] -- SCRIPT ...  run any torchrun script with the same cluster options, without the engine

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
    lines = [f"  {usage:<42}  {summary}\n" for usage, summary in (each.help for each in added_commands().values())]
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
    try:
        return _dispatch(list(arguments))
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
        print(metadata.version("launcher"))
        return EXIT_DONE
    function = command_function(verb)
    try:
        return function(list(rest))
    except OnLoginNode as there:
        from launcher.cli.elsewhere import elsewhere

        return elsewhere().run_there(there, verb, rest)
