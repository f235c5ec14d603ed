"""Control of existing runs: cancel, resume, retry, send a record to trackers, wait for the end."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from launcher.config.schema import ClusterKind
from launcher.errors import SiteError, UserError
from launcher.launch import local
from launcher.launch.agent import load_plan
from launcher.launch.slurm import client, submit
from launcher.plan.clusters import cluster_of
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import first_number
from launcher.rundir import history
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_config, read_json, write_json
from launcher.rundir.history import Submission
from launcher.rundir.job_end import end_status
from launcher.rundir.paths import RunPaths
from launcher.runs.status import ACTIVE, Run, RunState, statuses_of
from launcher.trackers.installed import described_tracker, mirrors_of
from launcher.trackers.tracker_processes import TrackerProcesses, without_rest

_LOOK_EVERY_S = 0.5
_ASK_SLURM_EVERY_S = 2.0
# in addition to the time that Slurm (KillWait) or the launcher (cluster.grace_s) gives the workers
_ENDS_WITHIN_S = 60
# limit of `launch mirror`, seconds: a long record takes a server minutes
MIRRORS_WITHIN_S = 3600
MAY_CONTINUE = ACTIVE | {RunState.unknown}


def status_of(paths: RunPaths) -> Run:
    """Return the status of one run."""
    return statuses_of([paths])[0]


def cancel_runs(runs: Sequence[Run], say: Callable[[str], None]) -> list[Run]:
    """Cancel runs, and wait until no process and no incomplete checkpoint of them is left.

    The workers first finish their window and save, within Slurm's KillWait or cluster.grace_s.

    Raises:
        UserError: A run is over already.
        SiteError: A run belongs to another host, or does not end.
    """
    for run in runs:
        if run.state is RunState.unknown:
            raise SiteError(f"{run.name}: cannot be cancelled from this host: {run.detail}.")
        _require_readable(run)
        if run.state not in ACTIVE:
            raise UserError(f"{run.name}: is {run.state.value}; there is nothing to cancel.")
    places = [RunPaths(Path(run.dir)) for run in runs]
    left = list(runs)
    try:
        for paths in places:
            history.amend_submission(paths, cancelled=True)  # first, because it prevents a requeue of the job
        for run in _end(runs):
            left.remove(run)
    except BaseException:
        for run in left:
            history.amend_submission(RunPaths(Path(run.dir)), cancelled=False)
        raise
    for paths in places:
        history.note_event(paths, "cancelled", by=Submission.now().user)
    what, whose = (runs[0].name, "its") if len(runs) == 1 else (f"{len(runs)} runs", "their")
    say(f"Cancelling {what}: {whose} workers finish their window and save.")
    wait_s = _patience_s([load_plan(paths.plan) for paths in places])
    end = time.monotonic() + wait_s
    while left := [run for run in statuses_of(places) if run.state in MAY_CONTINUE]:
        if time.monotonic() > end:
            raise SiteError(
                f"{left[0].name}: is still {left[0].state.value} ({left[0].detail}) {wait_s:.0f} s after it was "
                "cancelled."
            )
        time.sleep(_LOOK_EVERY_S)
    for paths in places:
        for _, partial in paths.partial_checkpoints():
            shutil.rmtree(partial, ignore_errors=True)
    return statuses_of(places)


def _end(runs: Sequence[Run]) -> Iterator[Run]:
    """Ask the runs to end, and yield each one that was asked."""
    on_slurm = [run for run in runs if run.kind == ClusterKind.slurm]
    if jobs := [run.job for run in on_slurm if run.job is not None]:
        client.cancel(*jobs)
    yield from on_slurm
    for run in runs:
        if run.kind != ClusterKind.slurm:
            pid = history.submissions(RunPaths(Path(run.dir)))[-1].pid
            assert pid is not None
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass  # the run has ended meanwhile
            except PermissionError:
                raise SiteError(f"{run.name}: belongs to {run.user}, and only {run.user} can cancel it.") from None
            yield run


def _patience_s(plans: Sequence[LaunchPlan]) -> float:
    """Return the seconds within which cancelled runs must end."""
    limits = [plan.cluster.grace_s for plan in plans if plan.cluster.kind != ClusterKind.slurm]
    if len(limits) < len(plans):
        limits.append(first_number({"KillWait": "30"} | client.settings(), "KillWait"))
    return max(limits) + _ENDS_WITHIN_S


def to_resume(run: Run) -> LaunchPlan:
    """Return the plan of a run that is to resume from its newest checkpoint, in its directory.

    Raises:
        UserError: The run is still active, or done.
        SiteError: It used several hosts without a scheduler.
    """
    if run.state is RunState.done:
        raise UserError(
            f"{run.name}: is done. `launch retry {run.name}` starts it again under another name; with a later end, "
            f"such as `launch resume {run.name} train.steps=...`, it continues."
        )
    return to_change(run)


def to_change(run: Run) -> LaunchPlan:
    """Return the plan as ``to_resume`` does, but allow a run that is done, for a change that gives it more to do."""
    return _plan_to_start_again(run, "resume")


def _plan_to_start_again(run: Run, verb: str) -> LaunchPlan:
    plan = _plan_of(RunPaths(Path(run.dir)))
    _require_over(run, verb)
    if cluster_of(plan.cluster.kind).typed_on_each_host:
        raise SiteError(
            f"{plan.run.name}: cluster={plan.cluster.kind}: its hosts have no scheduler to restart it.\n"
            "  Type the command again on each host, with another run.name."
        )
    if plan.cluster.kind == ClusterKind.local and not Path(plan.cluster.cwd).is_dir():
        raise SiteError(
            f"{plan.run.name}: {plan.cluster.cwd}, in which it was started, does not exist on this machine."
        )
    return plan


def _plan_of(paths: RunPaths) -> LaunchPlan:
    """Return the plan of a run that is to start again.

    Raises:
        UserError: plan.json is damaged, or names another directory because the run was copied or moved.
    """
    try:
        plan = load_plan(paths.plan)
    except (ValueError, TypeError, LookupError, OSError) as error:
        raise UserError(
            f"{paths.plan}: is not a plan of a run: {type(error).__name__}: {error}.\n  Restore it from a copy."
        ) from None
    if plan.paths.root.resolve() != paths.root.resolve():
        raise UserError(
            f"{paths.root}: is a copy of run {plan.run.name}, or was moved: its plan.json names {plan.run.dir}.\n"
            "  A run resumes only in the directory and under the name with which it started: move it back."
        )
    return plan


def to_retry(run: Run) -> LaunchPlan:
    """Make the directory of a new run with the same plan and code under another name. Return its plan.

    Raises:
        UserError: The run is still active, or the weights that it started with are gone or have changed.
        SiteError: It used several hosts without a scheduler.
    """
    paths = RunPaths(Path(run.dir))
    plan = _plan_to_start_again(run, "retry")
    if isinstance(plan, RunPlan) and plan.initial is not None:
        plan.initial.require_unchanged()
    plan = _renamed(plan, paths)
    local.create(plan, read_config(paths.config))
    if paths.code.is_dir():
        shutil.copytree(paths.code, plan.paths.code)
    return plan


def resubmit(plan: LaunchPlan) -> str:
    """Submit a plan of ``to_resume`` or ``to_retry`` to Slurm. Return the job's id.

    If a first submission fails, the run's directory is removed.
    """
    first = not history.submissions(plan.paths)
    try:
        return submit.submit_one(plan)
    except BaseException:
        if first:
            shutil.rmtree(plan.paths.root, ignore_errors=True)
        raise


def _renamed(plan: LaunchPlan, paths: RunPaths) -> LaunchPlan:
    """Return the plan as a new run: the name with a number appended, a new id, and its own paths."""
    stem = re.sub(r"\.retry\d+$", "", plan.run.name)
    number = 1
    while (root := paths.root.with_name(f"{stem}.retry{number}")).exists():
        number += 1
    run = dataclasses.replace(
        plan.run,
        name=root.name,
        id=secrets.token_hex(4),
        dir=str(root),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    old_code, new_code = str(paths.code), str(RunPaths(root).code)

    def moved(place: str) -> str:
        return new_code + place[len(old_code) :] if place.startswith(f"{old_code}{os.sep}") else place

    plan = plan.as_run(run)
    cluster = dataclasses.replace(plan.cluster, import_from=tuple(map(moved, plan.cluster.import_from)))
    command = tuple(map(moved, plan.command))
    own = {name: os.pathsep.join(map(moved, value.split(os.pathsep))) for name, value in plan.env.set.items()}
    env = dataclasses.replace(plan.env, set=own)
    return dataclasses.replace(plan, cluster=cluster, command=command, env=env)


def mirror_again(run: Run) -> list[tuple[str, str]]:
    """Send the trackers of a run that has ended what they lack of its record.

    Returns:
        Title and problem of each tracker; no problem: it has everything.

    Raises:
        UserError: The run is still active, or has no tracker that stores it.
    """
    paths = RunPaths(Path(run.dir))
    _plan_of(paths)  # checks it
    _require_over(run, "mirror")
    plan = RunPlan.of_record(paths)
    trackers = () if plan is None else mirrors_of(plan)
    if plan is None or not trackers:
        raise UserError(
            f"{run.name}: has no tracker that stores it.\n  `launch resume {run.name} trackers=[wandb]` adds one."
        )
    fields = Fence(paths, Incarnation()).newest()
    newest = Incarnation.parse(fields.pop("incarnation", "0.0"))
    # a process of the last start may still be delivering: it stops
    fence = Fence(paths, dataclasses.replace(newest, restart=newest.restart + 1))
    fence.claim(**fields)
    for tracker in trackers:  # what is wrong is found out again
        if (status := read_json(paths.tracker_status(tracker))) is not None:
            write_json(paths.tracker_status(tracker), status | {"problem": None})
    processes = TrackerProcesses(dataclasses.replace(plan, trackers=trackers), fence.own)
    processes.start()
    complete = processes.finish(MIRRORS_WITHIN_S)

    def problem(tracker: str) -> str:
        known = without_rest((read_json(paths.tracker_status(tracker)) or {}).get("problem") or "")
        early = f"its process ended early. See {paths.tracker_log(tracker)}, and run this command again."
        return known or ("" if tracker in complete else early)

    return [(described_tracker(tracker).title, problem(tracker)) for tracker in trackers]


def _require_readable(run: Run) -> None:
    if run.state is RunState.unreadable:
        raise UserError(f"{run.name}: is unreadable: {run.detail}.\n  Restore that file of {run.dir} from a copy.")


def _require_over(run: Run, verb: str) -> None:
    _require_readable(run)
    if run.state in MAY_CONTINUE:
        raise UserError(
            f"{run.name}: is {run.state.value}{f' ({run.detail})' if run.detail else ''}.\n"
            f"  `launch {verb}` is for a run that has ended; `launch cancel {run.name}` ends it."
        )


def follow(paths: RunPaths, display: local.Display) -> Run:
    """Show a Slurm run until it is over, through every requeue. Ctrl-C only ends the display."""
    last_query = 0.0
    try:
        while True:
            display.refresh()
            if time.monotonic() - last_query >= _ASK_SLURM_EVERY_S:
                last_query = time.monotonic()
                run = status_of(paths)
                if run.state not in MAY_CONTINUE:
                    display.refresh()
                    return run
            time.sleep(local.POLL_S)
    finally:
        display.close()


def wait_for(places: Sequence[RunPaths], say: Callable[[Sequence[Run]], None]) -> list[Run]:
    """Wait until all runs are over, through every requeue. ``say``: called with their status every two seconds."""
    while True:
        runs = statuses_of(places)
        if not any(run.state in MAY_CONTINUE for run in runs):
            return runs
        say(runs)
        time.sleep(_ASK_SLURM_EVERY_S)


def run_exit_status(run: Run) -> int:
    """Return the exit status of a command that waited for the run."""
    return end_status({"verdict": run.state, "failure": run.failure})
