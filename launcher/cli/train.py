"""`launch train` and `run`: from a config to a job, or to a sweep of jobs."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.cli.overrides import take_flag, with_config
from launcher.config.foreign_keys import translation
from launcher.config.multirun import RequestedCell, Result
from launcher.config.schema import ClusterKind, Config, check_values
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    ConfigError,
    RunError,
    UserError,
)
from launcher.launch import local
from launcher.launch.credentials import require_credentials
from launcher.launch.outer_job import allocation_note
from launcher.launch.planner import new_run, plan_job, site_of
from launcher.launch.program import no_program, require_program
from launcher.launch.slurm import client, submit
from launcher.plan.callback_plan import BELL
from launcher.plan.clusters import Peers, cluster_of
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.placement import solve_script
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.record.report_entry import leave_entry
from launcher.report import live, run_list, tables
from launcher.rundir.paths import SweepPaths, is_sweep
from launcher.runs import control
from launcher.runs.status import Run, RunState
from launcher.sweeps.conductor import Conductor
from launcher.sweeps.reuse import look_at_sweeps, restart_runs
from launcher.trackers.wandb_tracker import trial_of_wandb

if TYPE_CHECKING:
    from rich.console import Console


def launch_train(arguments: list[str]) -> int:
    quiet, wait, yes = (take_flag(flag, arguments) for flag in ("--quiet", "--wait", "--yes"))
    if {"-m", "--multirun"} & set(arguments) and not {"--help", "-h", "--cfg", "-c"} & set(arguments):
        return _train_sweep(arguments, live.console(quiet=quiet), wait=wait, confirmed=yes)
    if yes:
        raise UserError("--yes: has no effect on a single run.\n  It confirms a sweep (-m) of very many cells.")

    def act(config: Config, yaml: str) -> int:
        _require_startable(config, wait=wait)
        for name, value in dataclasses.asdict(config.sweep).items():
            if value is not None:
                raise ConfigError(f"sweep.{name}", value, "has no effect on a single run.", "Add -m for a sweep.")
        require_new_name(config)
        with live.waiting("Inspecting the task", quiet=quiet):
            plan = plan_job(config)
        return _start(plan, yaml, config, live.console(quiet=quiet), wait=wait)

    return with_config("train", arguments, act)


def launch_run(arguments: list[str]) -> int:
    """Run a user's own torchrun script, module or command, without the engine."""
    if "--" not in arguments and not {"--help", "-h", "--cfg"} & set(arguments):
        raise no_program(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, script = arguments[:cut], arguments[cut + 1 :]
    quiet, wait = take_flag("--quiet", ours), take_flag("--wait", ours)
    for argument in ours:
        key = argument.lstrip("+").partition("=")[0]
        if "=" in argument and key.partition(".")[0] not in ("cluster", "run", "notify", "hydra"):
            foreign, hint = translation(key), "`launch run` takes notify, and the keys of cluster and run."
            taken = any(f" {group}." in foreign for group in ("cluster", "run"))
            raise ConfigError(argument, None, "has no effect on a script.", foreign if taken else hint)

    def act(config: Config, yaml: str) -> int:
        check_values(config, "cluster", "run")
        _require_startable(config, wait=wait)
        stem = require_program(script, str(Path.cwd()), contained=config.cluster.container is not None)
        require_credentials(config, of_script=True)
        site = site_of(config.cluster)
        run = new_run(config.run, stem, site.cwd)
        plan = solve_script(config, site, run, script)
        return _start(plan, yaml, config, live.console(quiet=quiet), wait=wait)

    return with_config("run", ours, act)


def _require_startable(config: Config, *, wait: bool) -> None:
    _require_no_wait(config, wait=wait)
    if config.cluster.kind == ClusterKind.slurm:
        client.require()


def require_new_name(config: Config) -> None:
    """Raise SiteError if a run of this name exists, before the task is inspected, which can take minutes."""
    # on several hosts, another one may have made the directory on a shared disk
    if config.run.name is not None and not cluster_of(config.cluster.kind).typed_on_each_host:
        check_values(config, "run")
        local.require_unused(new_run(config.run, "", str(Path.cwd())))


def _require_no_wait(config: Config, *, wait: bool) -> None:
    if wait and config.cluster.kind != ClusterKind.slurm:
        raise UserError(
            f"--wait: has no effect with cluster={config.cluster.kind}, where the command always waits for the "
            "end.\n  Leave it out."
        )


def _start(plan: LaunchPlan, yaml: str, config: Config, console: Console, *, wait: bool) -> int:
    """Submit the job, or create its directory and run it here."""
    if plan.cluster.slurm is not None:
        plan, job = submit.submit_job(plan, yaml)
        if isinstance(plan, RunPlan):
            console.print(tables.plan_table(plan), "")
        return _show_submitted(plan, job, console, wait=wait)
    here = plan.cluster.kind == ClusterKind.local and not console.quiet
    if here and (note := allocation_note(os.environ, sys.argv[1:])):
        print(note, file=sys.stderr, flush=True)
    cluster, create = cluster_of(plan.cluster.kind), partial(local.create, config_yaml=yaml)
    return run_here(*cluster.start(plan, create, config.run.name, _plain(console)), console)


def restart(plan: LaunchPlan, console: Console, *, wait: bool) -> int:
    """Run or resubmit a job in its existing directory."""
    if plan.cluster.slurm is not None:
        return _show_submitted(plan, control.resubmit(plan), console, wait=wait)
    return run_here(plan, Peers(), console)


def run_here(plan: LaunchPlan, peers: Peers, console: Console) -> int:
    """Run a job on this host in its existing directory, and show its plan and its results."""
    first = plan.node == 0
    if first and isinstance(plan, RunPlan):
        console.print(tables.plan_table(plan), "")
    elif first and sys.stderr.isatty():  # what programs read is the script's own output
        print(f"Run {plan.run.name}: {tables.near(plan.paths.root)}", file=sys.stderr)
    verdict = local.run_job(plan, live.run_display(plan, console), peers)
    # after a stop nobody may read any more, as in a terminal that is closing
    if not live.finish_output(console, patient=verdict.summary["verdict"] not in ("stopped", "killed")):
        if first:
            leave_entry(plan.paths)
        local.report_outcome(verdict.plan, verdict.summary)
        return verdict.status
    nodes = verdict.plan.cluster.nodes
    recorded = plan.on(nodes) if isinstance(plan, RunPlan) else RunPlan.of_record(plan.paths)
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary, verdict.plan.node), file=sys.stderr)
    elif not first:
        _plain(console)(f"Run {plan.run.name}: {verdict.summary['verdict']}")
    elif recorded is not None:
        console.print("", tables.summary_table(recorded, verdict.summary))
    of_sweep = is_sweep(plan.paths.root.parent) and "failure" not in verdict.summary  # whose hint is printed at its end
    if first and recorded is not None and recorded.checkpoint.enabled and verdict.summary["verdict"] != "done":
        name, step = run_list.command_name(plan.paths.root), plan.paths.newest_step()
        if not of_sweep and (hint := tables.resume_hint(verdict.summary.get("failure"), step, name)):
            print(hint, file=sys.stderr)
    if first:
        leave_entry(plan.paths)
    local.report_outcome(verdict.plan, verdict.summary)
    if BELL in verdict.plan.notify:
        console.bell()
    return verdict.status


def _show_submitted(plan: LaunchPlan, job: str, console: Console, *, wait: bool) -> int:
    """Show the submission and how to follow it; with ``wait``, follow it and return its exit status."""
    _plain(console)(run_list.submitted_text(plan, job))
    if not wait:
        return EXIT_DONE
    name = run_list.command_name(plan.paths.root)
    try:
        run = control.follow(plan.paths, live.run_display(plan, console))
        live.finish_output(console, patient=True)
    except KeyboardInterrupt:
        if not live.finish_output(console, patient=False):
            raise
        _plain(console)(f"No longer watching; the job continues: launch status {name}")
        raise
    if BELL in plan.notify:
        console.bell()
    if run.failure is not None:
        print(run_list.failure_of(run), file=sys.stderr)
        if run.resumes_from and (hint := tables.resume_hint(run.failure, run.resumes_from, name)):
            print(hint, file=sys.stderr)
    elif not console.quiet:
        console.print(run_list.status_table(run))
    return control.run_exit_status(run)


def _plain(console: Console) -> Callable[[str], None]:
    """Return a function that prints one line without colours."""
    return partial(console.print, markup=False, highlight=False)


def _train_sweep(arguments: list[str], console: Console, *, wait: bool, confirmed: bool) -> int:
    """Run a sweep and return the highest exit status of its cells; 2 if a cell is impossible, the others run anyway."""
    if sweep := trial_of_wandb(os.environ):
        raise UserError(
            f"launch train -m: a trial of W&B sweep {sweep} is one run, and a sweep has many.\n  Leave -m out of the "
            "sweep's command; or unset WANDB_SWEEP_ID for a sweep of your own."
        )
    conductor = Conductor(
        arguments, _cell_runner(console), _state_printer(console), _plain(console), wait=wait, confirmed=confirmed
    )

    def begin(requested: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
        _require_no_wait(requested[0].config, wait=wait)
        return conductor.begin(requested, with_results)

    best: list[str] = []

    def keep(files: Path) -> None:
        """Copy a sweeper's own results, such as Optuna's optimization_results.yaml."""
        for file in files.glob("*_results.yaml"):
            if conductor.paths is not None and conductor.paths.root.is_dir():
                shutil.copy2(file, conductor.paths.root)
                best.append(best_trial(file))

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        raise AssertionError("the cells of a sweep are started by the conductor")

    try:
        status = with_config("train", arguments, act, cells=begin, confirmed=confirmed, keep=keep)
    except KeyboardInterrupt:
        status = EXIT_RESUMABLE if conductor.status == EXIT_RESUMABLE else EXIT_INTERRUPTED
        if conductor.submitted:
            _plain(console)("No longer watching; the jobs continue.")
    except RunError as error:  # raised by a sweeper that needs the cell's result
        print(f"launch: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if conductor.paths is not None and conductor.paths.manifest.exists():
        _show_sweep(conductor.paths, conductor.submitted, len(conductor.reused), console)
        for line in filter(None, best):
            _plain(console)(line)
    return max(status, conductor.status)


def best_trial(results: Path) -> str:
    """Return the best trial in the results that a sweeper of Hydra's, such as Optuna's or Nevergrad's, has written;
    empty if they name none, as with several objectives."""
    import yaml

    content: Any = yaml.safe_load(results.read_text(encoding="utf-8"))
    found = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    params = found.get("best_params", found.get("best_evaluated_params"))
    value = found.get("best_value", found.get("best_evaluated_result"))
    if not isinstance(params, dict) or value is None:
        return ""
    shown = " ".join(f"{key}={each}" for key, each in cast("dict[str, Any]", params).items())
    return f"Best trial: {value if isinstance(value, str) else format(value, '.6g')} with {shown}"


def restart_cells(
    paths: SweepPaths,
    choose: Callable[[], Sequence[Run]],
    planned: Callable[[Run], LaunchPlan],
    console: Console,
    *,
    wait: bool,
) -> int:
    """Restart runs of a sweep and show the result; see ``launcher.sweeps.reuse.restart_runs``."""
    restarted = restart_runs(paths, choose, planned, _cell_runner(console), _state_printer(console), _plain(console))
    for problem in restarted.refused:
        print(f"launch: {problem}", file=sys.stderr)
    statuses = restarted.statuses
    if restarted.jobs and wait:
        statuses += [control.run_exit_status(run) for run in control.wait_for(restarted.runs, _state_printer(console))]
    _show_sweep(paths, restarted.jobs, 0, console)
    return max(statuses, default=EXIT_DONE)


def _cell_runner(console: Console) -> Callable[[LaunchPlan], int]:
    return lambda plan: run_here(plan, Peers(), console)


def _state_printer(console: Console) -> Callable[[Sequence[Run]], None]:
    """Return a function that prints a line whenever the state of one of the runs has changed."""
    last = ""

    def watch(runs: Sequence[Run]) -> None:
        nonlocal last
        if (line := run_list.states_text(runs)) != last:
            last = line
            _plain(console)(line)

    return watch


# without a failure, whose own message says what to do
_RESUMED = frozenset({RunState.stopped, RunState.cancelled, RunState.lost, RunState.failed})


def _show_sweep(paths: SweepPaths, jobs: Sequence[str], reused: int, console: Console) -> None:
    cells = look_at_sweeps([paths])[str(paths.root)]
    console.print(run_list.sweep_table(paths, cells))
    _plain(console)(run_list.sweep_text(paths, jobs, reused))
    # on the standard error stream, as the hint of a single run
    if (never := sum(not cell.dir and cell.state is RunState.pending for cell in cells)) and not jobs:
        print(f"{count(never, 'cell')} never started: the command that began the sweep starts them.", file=sys.stderr)
    if (ended := sum(cell.failure is None and cell.state in _RESUMED for cell in cells)) and not jobs:
        hint = f"`launch resume {run_list.command_name(paths.root)}` continues them from their checkpoints"
        print(f"{count(ended, 'cell')} unfinished: {hint}, or from step 0 without one.", file=sys.stderr)
    if console.quiet:
        for line in run_list.impossible_lines(cells):
            print(line, file=sys.stderr)
