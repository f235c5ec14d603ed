"""How a run becomes a job of Slurm's: plan and code are frozen in its directory, submitit writes the script, sbatch
takes it."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

from launcher import container, snapshot
from launcher.cluster import events, jobfile, local
from launcher.cluster.jobfile import Submission
from launcher.cluster.slurm import client, node
from launcher.cluster.slurm.refusal import refusal
from launcher.errors import ConfigError
from launcher.placement import SCRIPT_COMMAND
from launcher.plan import LaunchPlan, RunPlan
from launcher.site import OWN_MEMORY, batch_env, file_system

P = TypeVar("P", bound=LaunchPlan)

# a task that fails ends the others, which may wait for it
_TOGETHER = ("--kill-on-bad-exit=1",)
# signals that come before the agent can handle them must not kill the task: once it is up, it asks Slurm what it missed
_PYTHON = '/bin/sh -c \'trap "" TERM USR2; exec "$0" "$@"\' {} -P'


def submit(plan: P, config_yaml: str) -> tuple[P, str]:
    """Make the run's directory, copy the user's code into it, and submit. Returns the plan as it was frozen, and the
    job's id.

    Raises:
        ConfigError: Slurm refuses the job; nothing is left behind then.
        SiteError: no Slurm here, or a directory that cannot be used.
    """
    client.require()
    _require_shared(plan.paths.root)
    container.srun_options(plan, os.environ)  # refuses what cannot be mounted
    roots = _roots(plan)
    local.create(plan, config_yaml)
    try:
        plan = _freeze(plan, roots)
        plan.save()
        return plan, send(plan)
    except BaseException:
        shutil.rmtree(plan.paths.root, ignore_errors=True)
        raise


def send(plan: LaunchPlan) -> str:
    """Submit a run whose directory is there, for the first time or once more; the job's id."""
    number = jobfile.add(plan.paths, Submission.now())
    try:
        job = hand_over(plan, node.run_node, plan.run.dir, number)
    except BaseException:
        # sbatch may have given up on an answer, or been interrupted, with the job in the queue already
        client.cancel_named(plan.run.name, Submission.now().user)
        jobfile.amend(plan.paths, refused=True)
        raise
    jobfile.amend(plan.paths, job=job)
    events.note(plan.paths, "submitted", job=job)
    return job


def hand_over(
    plan: LaunchPlan, function: Callable[..., object], *arguments: object, srun: Sequence[str] = _TOGETHER
) -> str:
    """Have Slurm call ``function(*arguments)`` once on each node, on the plan's options and in its environment; the
    job's id. ``srun``: options of the step.

    Raises:
        ConfigError, SiteError: Slurm refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        # submitit repeats sbatch's words, which the refusal has too
        with _submitters_environment(plan), redirect_stderr(io.StringIO()):
            return _executor(plan, srun).submit(function, *arguments).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        raise refusal(plan, str(error)) from None


def script(plan: LaunchPlan, srun: Sequence[str] = _TOGETHER) -> str:
    """The batch script, as submitit writes it."""
    executor = _executor(plan, srun)
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _executor(plan: LaunchPlan, srun: Sequence[str]) -> Any:
    import submitit

    class Executor(submitit.SlurmExecutor):
        """submitit looks for srun before it renders anything; here the caller has looked, where that is needed."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    slurm = plan.cluster.slurm
    assert slurm is not None
    options = {name: value for name, value in slurm.options.items() if not container.is_option(name)}
    python = sys.executable if slurm.container is None else container.PYTHON
    limit = options.pop("time", None)
    executor = Executor(plan.paths.slurm, python=_PYTHON.format(shlex.quote(python)))
    executor.update_parameters(
        job_name=options.pop("job-name"),
        nodes=options.pop("nodes"),
        ntasks_per_node=options.pop("ntasks-per-node"),
        time=limit,
        signal_delay_s=slurm.signal_s,
        setup=[*slurm.setup] or None,
        stderr_to_stdout=True,
        wckey=None,  # a cluster that checks these knows none called submitit
        additional_parameters=options,
        # srun does not take the cores over from sbatch
        srun_args=[*srun, f"--cpus-per-task={slurm.cpus_per_node}", *container.srun_options(plan, os.environ)],
    )
    return executor


@contextmanager
def _submitters_environment(plan: LaunchPlan) -> Generator[None, None, None]:
    """sbatch hands its environment to the job: no secret goes along, and nothing of a job that this one comes from."""
    before = dict(os.environ)
    kept = batch_env(before, plan.env.allow)
    os.environ.clear()
    os.environ |= kept
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _roots(plan: LaunchPlan) -> list[Path]:
    if isinstance(plan, RunPlan):
        return snapshot.roots_of_task(plan.task.target, plan.cluster.cwd)
    return snapshot.roots_of_script(_script_of(plan))


def _script_of(plan: LaunchPlan) -> Path:
    return Path(plan.cluster.cwd) / plan.command[len(SCRIPT_COMMAND)]


def _freeze(plan: P, roots: Sequence[Path]) -> P:
    """``plan`` on copies of the user's code."""
    copies = snapshot.take(roots, plan.paths.code, plan.paths.root.parent)
    if not copies:
        return plan
    if not isinstance(plan, RunPlan):
        name = _script_of(plan).resolve().name
        if not (Path(copies[0]) / name).exists():  # git ignores it, but it was named
            shutil.copy2(_script_of(plan), copies[0])
        at = len(SCRIPT_COMMAND)
        command = (*plan.command[:at], str(Path(copies[0]) / name), *plan.command[at + 1 :])
        env = plan.env
        if path := snapshot.moved_pythonpath(roots, copies):
            env = dataclasses.replace(env, set=env.set | {"PYTHONPATH": path})
        return dataclasses.replace(plan, command=command, env=env)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, import_from=copies))


def _require_shared(directory: Path) -> None:
    """Raises ConfigError for a run directory that no other machine can see. One on a disk of this machine's own cannot
    be told from a shared one here: `launch doctor` can."""
    mount, kind = file_system(directory)
    if kind in OWN_MEMORY:
        raise ConfigError(
            "run.dir", directory.parent, f"lies in this machine's memory ({kind} on {mount}): the nodes do not see it.",
            "Use a run.dir on a disk that the login node and all nodes share.",
        )  # fmt: skip
