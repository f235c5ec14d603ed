"""`launch COMMAND`: dispatch to a command; a user's mistake becomes one message and exit status 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from launcher.cli.overrides import explain, explain_disk, nobody_reads
from launcher.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, LauncherError, UserError, did_you_mean

HELP = """\
launch: distributed training where the effective global batch is a contract.

  launch train [key=value ...]                run a job, or submit it: the bundled one, or task._target_=my_tasks.MyTask
  launch plan  [key=value ...]                what would run, solved and predicted; starts nothing
  launch verify [key=value ...]               is this job's accumulated gradient that of one big batch?
  launch drill  [key=value ...]               does this job survive preemption and kills? interrupts and compares it
  launch run   [key=value ...] -- SCRIPT ...  any torchrun script on the same cluster options, without the engine

  launch runs   [SWEEP]                       what runs exist, and how they stand
  launch status RUN                           one of them: where it is, what happened, why it failed
  launch logs   RUN [--rank R] [--follow]     what a rank printed
  launch cancel RUN                           end it; its workers save first
  launch resume RUN   [key=value ...]         let it go on from its newest checkpoint, with something changed
  launch retry  RUN                           start it again, with the plan and the code that it had
  launch report RUN... | SWEEP                compare runs: a table, CSV, JSON, and one HTML page with plots
  launch doctor [key=value ...]               is this machine, or the cluster, fit to run?

  train, run   --quiet      print nothing but errors           --wait         with cluster=slurm: until the end
  train        -m           a sweep: one run for each combination of key=1,2,4     --yes    however many these are
  plan, verify --json       the plan, or the certificate, as JSON
  resume       --force      even where key=value changes what is learned
  drill        --json       what was found                     --windows N    of each of its runs (default: 8)
  RUN          a run's name, its directory, or the beginning of its name; --dir DIR: where runs lie (default: runs)
  what reads   --json       for scripts
  report       --csv        for spreadsheets                   --html FILE    where the page goes; --loss X: hours to X
  overrides    --help       the config's groups and values     --cfg job      the composed config
               --config-dir DIR   more config files of your own
  launch --version

Exit status: 0 done; 1 the job failed; 2 the input is wrong; 75 stopped from outside, resumable; 130 stopped by Ctrl-C.
"""

# command -> module:function; only the module of the given command is imported
_VERBS = {
    "train": "train:train",
    "plan": "train:plan",
    "verify": "verify:verify",
    "drill": "drill:drill",
    "run": "train:run_script",
    "runs": "runs:runs",
    "status": "runs:status",
    "logs": "runs:logs",
    "cancel": "runs:cancel",
    "resume": "runs:resume",
    "retry": "runs:retry",
    "report": "report:report",
    "doctor": "doctor:doctor",
}


def main() -> None:
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        status = nobody_reads()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one `launch` command and return its exit status."""
    try:
        return _dispatch(list(arguments))
    except LauncherError as error:
        return explain(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        return explain_disk(error)
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
    if verb not in _VERBS:
        raise UserError(
            f"launch {verb}: there is no such verb.\n  {did_you_mean(verb, _VERBS)}Verbs: {', '.join(_VERBS)}."
        )
    module, _, function = _VERBS[verb].partition(":")
    return getattr(importlib.import_module(f"launcher.cli.{module}"), function)(rest)
