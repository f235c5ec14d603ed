"""`launch VERB`: finds the verb, hands the rest to Hydra, turns a user's mistake into one message and status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, ConfigError, UserError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.cluster.local import Verdict
    from launcher.cluster.peers import Peers
    from launcher.config import Config
    from launcher.plan import LaunchPlan

P = TypeVar("P", bound="LaunchPlan")

HELP = """\
launch: distributed training where the effective global batch is a contract.

  launch train [key=value ...]                run a job: the bundled one, or task._target_=my_tasks.MyTask
  launch plan  [key=value ...]                what would run, solved and predicted; starts nothing
  launch run   [key=value ...] -- SCRIPT ...  any torchrun script on the same cluster options, without the engine

  train, run   --quiet      print nothing but errors
  plan         --json       the plan as JSON
  all          --help       the config's groups and values     --cfg job      the composed config
               --config-dir DIR   more config files of your own
  launch --version

Exit status: 0 done; 1 the job failed; 2 the input is wrong; 130 stopped by Ctrl-C.
"""


# Hydra's, by whether a value follows
_HYDRA_FLAGS = {
    "--help": False, "-h": False, "--hydra-help": False, "--resolve": False, "--run": False, "-r": False,
    "--multirun": False, "-m": False, "--cfg": True, "-c": True, "--package": True, "-p": True,
    "--info": True, "-i": True, "--config-name": True, "-cn": True, "--config-dir": True, "-cd": True,
    "--config-path": True, "-cp": True,
}  # fmt: skip
_OWN_FLAGS = ("--quiet", "--json")


def main() -> None:
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        status = _nobody_reads()
    sys.exit(status)


def _nobody_reads() -> int:
    """Whoever was reading has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


def run(arguments: Sequence[str]) -> int:
    """One call of `launch`; returns its exit status."""
    try:
        return _dispatch(list(arguments))
    except UserError as error:
        return _explain(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _explain(error: UserError) -> int:
    print(f"launch: error: {error}", file=sys.stderr)
    return error.exit_status


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
    return _VERBS[verb](rest)


def _take(flag: str, arguments: list[str]) -> bool:
    """Remove ``flag``, which is this program's and not Hydra's; whether it was there."""
    there = flag in arguments
    arguments[:] = [argument for argument in arguments if argument != flag]
    return there


def _require_overrides(arguments: list[str]) -> None:
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


def _with_config(verb: str, arguments: list[str], act: Callable[[Config, str], int]) -> int:
    from launcher.compose import run_with_config

    _require_overrides(arguments)

    def act_or_explain(config: Config, yaml: str) -> int:
        try:
            status = act(config, yaml)
        except UserError as error:
            return _explain(error)
        except BrokenPipeError:  # here, or Hydra makes an error message of it
            return _nobody_reads()
        if status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # of a sweep, the cells that have not begun are left out too
        return status

    return run_with_config(verb, arguments, act_or_explain)


def _begin(plan: P, yaml: str, config: Config, console: Console) -> tuple[P, Peers]:
    """Make the run's directory; before that, meet the other hosts, if there are any."""
    from launcher.cluster import hosts, local
    from launcher.cluster.peers import Alone
    from launcher.config import ClusterKind

    if plan.cluster.kind is ClusterKind.hosts:
        return hosts.gather(plan, yaml, config.run.name, partial(console.print, markup=False, highlight=False))
    local.create(plan, yaml)
    return plan, Alone()


def _run_and_show(plan: LaunchPlan, peers: Peers, console: Console) -> Verdict:
    from launcher.cluster import local
    from launcher.report import tables, terminal
    from launcher.report.joined import JoinedDisplay

    shown = terminal.LiveDisplay if plan.node == 0 else JoinedDisplay
    verdict = local.run(plan, terminal.Silence() if console.quiet else shown(plan, console), peers)
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary, plan.node), file=sys.stderr)
    elif plan.node != 0:
        console.print(f"Run {plan.run.name}: {verdict.summary['verdict']}", markup=False, highlight=False)
    return verdict


def train(arguments: list[str]) -> int:
    from launcher.api import plan_job
    from launcher.report import tables, terminal

    quiet = _take("--quiet", arguments)

    def act(config: Config, yaml: str) -> int:
        plan = plan_job(config)
        console = terminal.console(quiet=quiet)
        plan, peers = _begin(plan, yaml, config, console)
        if plan.node == 0:
            console.print(tables.plan_table(plan), "")
        verdict = _run_and_show(plan, peers, console)
        if "failure" not in verdict.summary and plan.node == 0:
            console.print("", tables.summary_table(plan, verdict.summary))
        return verdict.status

    return _with_config("train", arguments, act)


def plan(arguments: list[str]) -> int:
    from launcher.api import plan_job

    as_json = _take("--json", arguments)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        solved = plan_job(config)
        if as_json:
            print(solved.to_json())
        else:
            from launcher.report import tables, terminal

            terminal.console().print(tables.plan_table(solved))
        return EXIT_DONE

    return _with_config("plan", arguments, act)


def run_script(arguments: list[str]) -> int:
    from launcher.api import new_run
    from launcher.placement import solve_script
    from launcher.report import terminal
    from launcher.site import Site
    from launcher.validate import check

    if "--" not in arguments and not {"--help", "-h", "--cfg"} & set(arguments):
        raise UserError("launch run: no script.\n  Use: launch run [key=value ...] -- SCRIPT [arguments ...].")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, script = arguments[:cut], arguments[cut + 1 :]
    quiet = _take("--quiet", ours)
    for argument in ours:
        group = argument.lstrip("+").partition("=")[0].partition(".")[0]
        if "=" in argument and group not in ("cluster", "run", "hydra"):
            raise ConfigError(argument, None, "has no effect on a script.", "`launch run` takes cluster and run keys.")

    def act(config: Config, yaml: str) -> int:
        check(config)
        if not script or not Path(script[0]).is_file():
            raise UserError(f"launch run: {script[0] if script else 'nothing after --'}: there is no such script.")
        site = Site.here()
        solved = solve_script(config.cluster, site, new_run(config.run, Path(script[0]).stem, site.cwd), script)
        console = terminal.console(quiet=quiet)
        solved, peers = _begin(solved, yaml, config, console)
        return _run_and_show(solved, peers, console).status

    return _with_config("run", ours, act)


_VERBS: dict[str, Callable[[list[str]], int]] = {"train": train, "plan": plan, "run": run_script}
