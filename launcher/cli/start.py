"""Start of a planned job from the command line: here, on several hosts, or on Slurm."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from launcher.config.schema import ClusterKind
from launcher.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.schema import Config
    from launcher.launch.local import Verdict
    from launcher.launch.peers import Peers
    from launcher.plan.launch_plan import LaunchPlan
    from launcher.plan.run_plan import RunPlan


P = TypeVar("P", bound="LaunchPlan")


def prepare(plan: P, yaml: str, config: Config, console: Console) -> tuple[P, Peers]:
    """Meet the other hosts, if any, then create the run's directory."""
    from launcher.launch import local, multihost
    from launcher.launch.peers import Peers

    if plan.cluster.kind is ClusterKind.hosts:
        return multihost.gather(plan, yaml, config.run.name, partial(console.print, markup=False, highlight=False))
    local.create(plan, yaml)
    return plan, Peers()


def _run_and_show(plan: LaunchPlan, peers: Peers, console: Console) -> Verdict:
    from launcher.launch import local
    from launcher.report import live, tables

    verdict = local.run(plan, live.run_display(plan, console), peers)
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary, verdict.plan.node), file=sys.stderr)
    elif plan.node != 0:
        console.print(f"Run {plan.run.name}: {verdict.summary['verdict']}", markup=False, highlight=False)
    return verdict


def run_here(plan: RunPlan, peers: Peers, console: Console) -> int:
    """Run a training job on this machine in its existing directory, and show its plan and results."""
    from launcher.report import tables

    if plan.node == 0:
        console.print(tables.plan_table(plan), "")
    verdict = _run_and_show(plan, peers, console)
    if "failure" not in verdict.summary and plan.node == 0:
        console.print("", tables.summary_table(plan.on(verdict.plan.cluster.nodes), verdict.summary))
    return verdict.status


def run_script_here(plan: LaunchPlan, peers: Peers, console: Console) -> int:
    """Run a script of `launch run` in the same way."""
    return _run_and_show(plan, peers, console).status


def go_on(plan: LaunchPlan, console: Console, *, wait: bool) -> int:
    """Run or resubmit a job in its existing directory."""
    from launcher.launch.peers import Peers
    from launcher.plan.run_plan import RunPlan
    from launcher.runs import control

    if plan.cluster.slurm is not None:
        return submitted(plan, control.send(plan), console, wait=wait)
    if isinstance(plan, RunPlan):
        return run_here(plan, Peers(), console)
    return run_script_here(plan, Peers(), console)


def submitted(plan: LaunchPlan, job: str, console: Console, *, wait: bool) -> int:
    """Show the submission and how to follow it; with ``wait``, follow it and return its exit status."""
    from launcher.report import live, run_list
    from launcher.runs import control

    console.print(run_list.submitted_text(plan, job), markup=False, highlight=False)
    if not wait:
        return EXIT_DONE
    try:
        run = control.follow(plan.paths, live.run_display(plan, console))
    except KeyboardInterrupt:
        console.print(
            f"No longer watching; the job continues: launch status {run_list.command_name(plan.paths.root)}",
            markup=False,
        )
        raise
    if run.failure is None and not console.quiet:
        console.print(run_list.status_table(run))
    elif run.failure is not None:
        print(run_list.failure_of(run), file=sys.stderr)
    return control.exit_status(run)


def require_no_wait(config: Config, *, wait: bool) -> None:
    if wait and config.cluster.kind is not ClusterKind.slurm:
        raise UserError(f"--wait: has no effect with cluster={config.cluster.kind.value}, which is waited for anyway.")
