"""`launch train`, `plan` and `run`: from a config to a job, or to what it would be."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.commands.overrides import explain, take, with_config
from launcher.config import ClusterKind
from launcher.errors import EXIT_DONE, ConfigError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.cluster.local import Verdict
    from launcher.cluster.peers import Peers
    from launcher.config import Config
    from launcher.plan import LaunchPlan, RunPlan
    from launcher.sweeps.sweeper import AskedCell, Result

P = TypeVar("P", bound="LaunchPlan")


def _begin(plan: P, yaml: str, config: Config, console: Console) -> tuple[P, Peers]:
    """Make the run's directory; before that, meet the other hosts, if there are any."""
    from launcher.cluster import hosts, local
    from launcher.cluster.peers import Alone

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
        print(tables.failure_text(verdict.summary, verdict.plan.node), file=sys.stderr)
    elif plan.node != 0:
        console.print(f"Run {plan.run.name}: {verdict.summary['verdict']}", markup=False, highlight=False)
    return verdict


def run_here(plan: RunPlan, peers: Peers, console: Console) -> int:
    """Run a training job whose directory is there, on this machine, and show how it went."""
    from launcher.report import tables

    if plan.node == 0:
        console.print(tables.plan_table(plan), "")
    verdict = _run_and_show(plan, peers, console)
    if "failure" not in verdict.summary and plan.node == 0:
        console.print("", tables.summary_table(plan.on(verdict.plan.cluster.nodes), verdict.summary))
    return verdict.status


def run_script_here(plan: LaunchPlan, peers: Peers, console: Console) -> int:
    """The same for a script of `launch run`."""
    return _run_and_show(plan, peers, console).status


def go_on(plan: LaunchPlan, console: Console, *, wait: bool) -> int:
    """Run, or submit once more, a job whose directory is there."""
    from launcher.cluster import control
    from launcher.cluster.peers import Alone
    from launcher.plan import RunPlan

    if plan.cluster.slurm is not None:
        return submitted(plan, control.send(plan), console, wait=wait)
    if isinstance(plan, RunPlan):
        return run_here(plan, Alone(), console)
    return run_script_here(plan, Alone(), console)


def submitted(plan: LaunchPlan, job: str, console: Console, *, wait: bool) -> int:
    """Say what was submitted, and how to follow it; or follow it to its end, and exit with its status."""
    from launcher.cluster import control
    from launcher.report import runs, terminal

    console.print(runs.submitted_text(plan, job), markup=False, highlight=False)
    if not wait:
        return EXIT_DONE
    try:
        run = control.follow(plan.paths, terminal.Silence() if console.quiet else terminal.LiveDisplay(plan, console))
    except KeyboardInterrupt:
        console.print(
            f"No longer watching; the job goes on: launch status {runs.called(plan.paths.root)}", markup=False
        )
        raise
    if run.failure is None and not console.quiet:
        console.print(runs.status_table(run))
    elif run.failure is not None:
        print(runs.failure_of(run), file=sys.stderr)
    return control.exit_status(run)


def require_no_wait(config: Config, *, wait: bool) -> None:
    if wait and config.cluster.kind is not ClusterKind.slurm:
        raise UserError(f"--wait: has no effect with cluster={config.cluster.kind.value}, which is waited for anyway.")


def _require_no_sweep(config: Config) -> None:
    for name, value in dataclasses.asdict(config.sweep).items():
        if value is not None:
            raise ConfigError(f"sweep.{name}", value, "has no effect on a single run.", "Add -m for a sweep.")


def train(arguments: list[str]) -> int:
    quiet, wait, yes = (take(flag, arguments) for flag in ("--quiet", "--wait", "--yes"))
    if {"-m", "--multirun"} & set(arguments) and not {"--help", "-h", "--cfg", "-c"} & set(arguments):
        from launcher.commands.sweep import train_sweep

        return train_sweep(arguments, quiet=quiet, wait=wait, confirmed=yes)
    if yes:
        raise UserError("--yes: has no effect on a single run.\n  It begins a sweep (-m) of very many cells.")

    def act(config: Config, yaml: str) -> int:
        from launcher.api import plan_job
        from launcher.cluster.slurm import client
        from launcher.report import tables, terminal

        require_no_wait(config, wait=wait)
        _require_no_sweep(config)
        if config.cluster.kind is ClusterKind.slurm:
            client.require()
        plan = plan_job(config)
        console = terminal.console(quiet=quiet)
        if plan.cluster.slurm is not None:
            from launcher.cluster.slurm import submit

            plan, job = submit.submit(plan, yaml)
            console.print(tables.plan_table(plan), "")
            return submitted(plan, job, console, wait=wait)
        return run_here(*_begin(plan, yaml, config, console), console)

    return with_config("train", arguments, act)


def plan(arguments: list[str]) -> int:
    from launcher.api import Once, plan_job

    as_json = take("--json", arguments)
    once = Once()
    statuses = [EXIT_DONE]

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        solved = plan_job(config, once)
        if as_json:
            print(solved.to_json())
        else:
            from launcher.report import tables, terminal

            terminal.console().print(tables.plan_table(solved))
            if solved.cluster.slurm is not None:
                from launcher.cluster.slurm import submit

                print(f"\nThe batch script:\n\n{submit.script(solved)}", end="")
        return EXIT_DONE

    def cells(asked: Sequence[AskedCell], with_results: bool) -> Sequence[Result]:
        """One after the other, under its name; what is wrong with one is said there."""
        if with_results:
            raise UserError(
                "hydra/sweeper: it learns from results, and a plan has none.\n  Leave it out, or use train."
            )
        for cell in asked:
            if not as_json:
                print(f"\n{' '.join(cell.overrides)}")
            try:
                act(cell.config, cell.yaml)
            except UserError as error:
                statuses.append(explain(error))
        return [None] * len(asked)

    return max(with_config("plan", arguments, act, cells=cells, confirmed=True), *statuses)


def run_script(arguments: list[str]) -> int:
    from launcher.api import new_run, where
    from launcher.cluster.slurm import client
    from launcher.placement import solve_script
    from launcher.report import terminal
    from launcher.validate import check

    if "--" not in arguments and not {"--help", "-h", "--cfg"} & set(arguments):
        raise UserError("launch run: no script.\n  Use: launch run [key=value ...] -- SCRIPT [arguments ...].")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, script = arguments[:cut], arguments[cut + 1 :]
    quiet, wait = take("--quiet", ours), take("--wait", ours)
    for argument in ours:
        group = argument.lstrip("+").partition("=")[0].partition(".")[0]
        if "=" in argument and group not in ("cluster", "run", "hydra"):
            raise ConfigError(argument, None, "has no effect on a script.", "`launch run` takes cluster and run keys.")

    def act(config: Config, yaml: str) -> int:
        check(config)
        require_no_wait(config, wait=wait)
        if config.cluster.kind is ClusterKind.slurm:
            client.require()
        if not script or not Path(script[0]).is_file():
            raise UserError(f"launch run: {script[0] if script else 'nothing after --'}: there is no such script.")
        site = where(config.cluster)
        solved = solve_script(config.cluster, site, new_run(config.run, Path(script[0]).stem, site.cwd), script)
        console = terminal.console(quiet=quiet)
        if solved.cluster.slurm is not None:
            from launcher.cluster.slurm import submit

            solved, job = submit.submit(solved, yaml)
            return submitted(solved, job, console, wait=wait)
        return run_script_here(*_begin(solved, yaml, config, console), console)

    return with_config("run", ours, act)
