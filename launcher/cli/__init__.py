"""`launch COMMAND`: dispatch to a command; a user's mistake becomes one message and exit status 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from launcher.cli.overrides import OnLoginNode, discard_output, print_disk_error, print_error
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, LauncherError, UserError, did_you_mean
from launcher.process import ENDS_WITH_INPUT, interrupt_at_end_of_input
from launcher.rundir.files import Unreadable

HELP = """\
launch: distributed training with an exact global batch.

  launch train [key=value ...]                run or submit a job: the bundled task, or task._target_=my_tasks.MyTask
  launch plan  [key=value ...]                show the job's plan: batch, memory and bytes; starts nothing
  launch verify [key=value ...]               compare the job's accumulated gradient with that of one big batch
  launch drill  [key=value ...]               interrupt the job in several ways and compare what it has learned
  launch run   [key=value ...] -- SCRIPT ...  run any torchrun script with the same cluster options, without the engine

  launch runs   [SWEEP]                       list all runs with their states, or the cells of a sweep
  launch top                                  show all runs, live: progress, loss, logs; cancel and resume them
  launch status RUN                           show one run: its state, its place, its events, and why it failed
  launch logs   RUN [--rank R] [--follow]     print the output of a rank
  launch cancel RUN                           stop a run; its workers save a checkpoint first
  launch resume RUN   [key=value ...]         resume a run from its newest checkpoint, with these keys changed
  launch retry  RUN                           start a run again from step 0, with the same plan and code
  launch mirror RUN                           send the trackers of a run that has ended what they lack
  launch export RUN --to DIR                  write the trained model as safetensors, in Hugging Face's layout
  launch report RUN... | SWEEP                compare runs: a table, CSV, JSON, and one HTML page with plots
  launch doctor [key=value ...]               check that this machine, or the cluster, is fit to run jobs
  launch keys   [WORD ...]                    show the keys: type, default, meaning; task=llama: those of a task
  launch completion SHELL                     print a script by which bash, zsh or fish completes all of this

  train, run   --quiet      print nothing but errors           --wait         with cluster=slurm: wait for the end
  train        -m           a sweep: one run for each combination of key=1,2,4     --yes    also very many
  plan         -m           rank the combinations of key=1,2,4 (key=all: all that are possible)
  plan, verify --json       the plan, the ranking or the certificate as JSON
  resume       --force      allow changes of keys that affect what is learned
  retry        --failed     of a sweep, the failed runs: the default
  drill        --json       the result as JSON                 --windows N    windows of each of its runs (default: 8)
  RUN          a run's name, its directory, or a prefix of its name; --dir DIR: directory of the runs (default: runs)
  runs, status, report, export, doctor   --json    for scripts
  status       --watch      show it until it is over; exit status: that of the run
  export       --step N     a checkpoint other than the newest --best         that of checkpoint.best
               --ema        the averages of the callback Ema  --merge-lora   into the model; else the adapter alone
               --dtype bf16 another number format             --max-shard-size SIZE   of a file (default: 5GB)
  keys         --json       for scripts                        --schema [GROUP]   JSON schema of config files
               --config-dir DIR   directory with your own options
  report       --csv        for spreadsheets                   --html FILE    path of the page; --loss X: hours to X
  overrides    --help       the config's groups and values     --cfg job      the composed config
               --config-dir DIR   directory with your own config files
  cluster.login=USER@HOST      train, run, plan, drill and doctor on that login node; RUN is found there, too
  launch --version

Exit status: 0 done; 1 the job failed; 2 the input is wrong; 75 stopped from outside, resumable; 130 stopped by Ctrl-C.
"""

# command -> module of launcher.cli with its function launch_COMMAND; only that module is imported
_MODULES = {
    **dict.fromkeys(("train", "run"), "train"),
    **{verb: verb for verb in ("plan", "keys", "completion")},
    **dict.fromkeys(("verify", "drill", "doctor"), "diagnose"),
    **dict.fromkeys(
        ("runs", "top", "status", "logs", "cancel", "resume", "retry", "mirror", "report", "export"), "runs"
    ),
}


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
        print(HELP, end="")
        return EXIT_DONE if arguments else EXIT_USER
    verb, *rest = arguments
    if verb == "--version":
        print(metadata.version("launcher"))
        return EXIT_DONE
    if verb not in _MODULES:
        raise UserError(
            f"launch {verb}: there is no such command.\n"
            f"  {did_you_mean(verb, _MODULES)}Commands: {', '.join(_MODULES)}."
        )
    module = importlib.import_module(f"launcher.cli.{_MODULES[verb]}")
    try:
        return getattr(module, f"launch_{verb}")(list(rest))
    except OnLoginNode as there:
        from launcher.cli.login import run_there

        return run_there(there, verb, rest)
