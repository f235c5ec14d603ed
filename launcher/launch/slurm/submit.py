"""Submission to Slurm: freezes plan and code in the run's directory; submitit writes and submits the sbatch script.

Its #SBATCH options come from launcher/plan/sbatch_options.py, the start of its tasks from launcher/plan/container.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from launcher.config.schema import ContainerRuntime
from launcher.errors import ConfigError, SiteError, UserError
from launcher.launch import local
from launcher.launch.program import is_command
from launcher.launch.slurm import client, node
from launcher.plan import container
from launcher.plan.host import OWN_MEMORY, file_system
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.placement import SCRIPT_COMMAND
from launcher.plan.run_plan import RunPlan
from launcher.process import RUN_ID, deferred_interrupts, environment, inherited_environment
from launcher.rundir import code_snapshot, history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission

P = TypeVar("P", bound=LaunchPlan)

# cluster.setup runs between these lines: the first command that fails ends the job, and the output names it
BEFORE_SETUP = (
    "set -e",
    """trap 'status=$?; [ -z "$setup_line" ] || """
    """echo "cluster.setup: \\`$setup_line\\` ended the job with status $status"' EXIT""",
    "trap 'setup_line=$BASH_COMMAND' DEBUG",
)

AFTER_SETUP = "trap - DEBUG; setup_line="
# a failing task ends the others, which may wait for it; tasks get what cluster.setup has exported, also where the site
# or cluster.sbatch.export restricts what a job gets
_SRUN_OPTIONS = ("--kill-on-bad-exit=1", "--export=ALL")
# place of the user's program in the command of `launch run`
_PROGRAM = len(SCRIPT_COMMAND)


def submit_job(plan: P, config_yaml: str) -> tuple[P, str]:
    """Make the run's directory, copy the user's code into it, and submit.

    Returns:
        The frozen plan and the job's id.

    Raises:
        ConfigError: Slurm refuses the job; nothing is left behind.
        SiteError: There is no Slurm here, or the directory cannot be used.
    """
    client.require()
    require_shared(plan.paths.root)
    require_container(plan)
    roots = _roots(plan)
    local.create(plan, config_yaml)
    try:
        plan = _freeze(plan, roots)
        plan.save()
        return plan, submit_one(plan)
    except BaseException:
        shutil.rmtree(plan.paths.root, ignore_errors=True)
        raise


def submit_one(plan: LaunchPlan) -> str:
    """Submit a run whose directory exists, for the first time or again. Return the job's id."""
    return submit_array([plan], plan.run.name, plan.paths.slurm)[0]


def max_array_size() -> int:
    """Return the number of jobs that an array may have. Raises SiteError if Slurm does not answer."""
    return max(1, int(client.settings().get("MaxArraySize", 1)))


def submit_in_arrays(
    plans: Sequence[LaunchPlan], stem: str, folder: Path, most: int, at_once: int | None
) -> list[str | UserError]:
    """Submit runs whose directories exist as job arrays: runs with the same ``array_key`` share one.

    Args:
        stem: stem of the arrays' job names; a unique suffix is added.
        folder: submitit's folder.
        most: jobs of an array; asked for before the directories are created, because Slurm may be silent.
        at_once: jobs of an array that may run at the same time; None: no limit.

    Returns:
        For each plan its job's id, or the error with which Slurm refused it.
    """
    by_shape: dict[str, list[int]] = {}
    for number, plan in enumerate(plans):
        by_shape.setdefault(array_key(plan), []).append(number)
    answers: dict[int, str | UserError] = {}
    for numbers in by_shape.values():
        for chunk in (numbers[at : at + most] for at in range(0, len(numbers), most)):
            name = f"{stem}.{secrets.token_hex(4)}"
            try:
                jobs: Sequence[str | UserError] = submit_array([plans[n] for n in chunk], name, folder, at_once)
            except UserError as error:
                jobs = [error] * len(chunk)
            answers |= zip(chunk, jobs, strict=True)
    return [answers[number] for number in range(len(plans))]


def submit_array(plans: Sequence[LaunchPlan], name: str, folder: Path, at_once: int | None = None) -> list[str]:
    """Submit runs of one ``array_key`` whose directories exist, several as one array. Return a job id for each.

    If Slurm refuses, none of them is submitted.

    Args:
        name: job name.
        folder: submitit's folder.
        at_once: jobs that may run at the same time; None: no limit.
    """
    require_container(plans[0])
    submission = dataclasses.replace(Submission.now(), name=name)
    known = {each.job for plan in plans for each in history.submissions(plan.paths)}
    each: list[tuple[str, int]] = []
    jobs: list[str] = []
    try:
        # a signal between sbatch and the record would leave a job that its run does not know
        with deferred_interrupts():
            for number, plan in enumerate(plans):
                own = dataclasses.replace(submission, array_task=number if len(plans) > 1 else None)
                each.append((plan.run.dir, history.add_submission(plan.paths, own)))
            jobs += _submit_function(plans[0], node.run_node, each, name=name, folder=folder, at_once=at_once)
            for plan, job in zip(plans, jobs, strict=True):
                history.amend_submission(plan.paths, job=job)
                history.note_event(plan.paths, "submitted", job=job)
    except BaseException:
        with suppress(SiteError):
            # sbatch may have failed after the job was queued, for example if its time was up
            if unwanted := jobs or _unrecorded(name, folder, known):
                client.cancel(*unwanted)
        for plan in plans[: len(each)]:
            history.amend_submission(plan.paths, refused=True)
        raise
    return jobs


def _unrecorded(name: str, folder: Path, known: Container[str | None]) -> list[str]:
    """Return the active jobs of this name that were submitted from ``folder`` and are not ``known``."""
    listed = client.named([name]).items()
    mine = [job for job, each in listed if each.folder == str(folder) and each.state not in client.ENDED]
    return [job for job in mine if job not in known]


def array_key(plan: LaunchPlan) -> str:
    """Return a key of what all jobs of one array must share: the request to Slurm, and the parent directory."""
    assert plan.cluster.slurm is not None
    slurm = dataclasses.asdict(plan.cluster.slurm)
    slurm["options"].pop("job-name")
    return json.dumps([slurm, plan.cluster.cwd, str(plan.paths.root.parent)], sort_keys=True)


def submit_function(
    plan: LaunchPlan, function: Callable[..., object], *arguments: object, srun: Sequence[str] = _SRUN_OPTIONS
) -> str:
    """Submit a job that calls ``function(*arguments)`` once on each node. Return the job's id.

    The job gets the options and the environment of ``plan``. ``srun``: options of the job step.

    Raises:
        ConfigError, SiteError: Slurm refuses the job.
    """
    return _submit_function(plan, function, [arguments], name=plan.run.name, folder=plan.paths.slurm, srun=srun)[0]


def _submit_function(
    plan: LaunchPlan,
    function: Callable[..., object],
    each: Sequence[Sequence[object]],
    *,
    name: str,
    folder: Path,
    srun: Sequence[str] = _SRUN_OPTIONS,
    at_once: int | None = None,
) -> list[str]:
    """Submit one job per entry of ``each``, which holds its arguments, as ``submit_function`` does. Return the job ids.

    Raises:
        ConfigError, SiteError: Slurm refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        # sbatch passes its environment to the job, and reads options from that of an enclosing job
        passed_on = inherited_environment(client.command_environment())
        calls = None
        if function is node.run_node:
            folder.mkdir(parents=True, exist_ok=True)
            calls = folder / f"{secrets.token_hex(8)}.json"
            write_json(calls, each)
        if len(each) == 1:  # the jobs of an array share their environment
            passed_on[RUN_ID] = plan.run.id
        # submitit prints sbatch's error, which the refusal contains too
        with environment(passed_on), redirect_stderr(io.StringIO()):
            executor = _executor(plan, srun, name, folder, calls)
            executor.update_parameters(array_parallelism=at_once or len(each))
            return [job.job_id for job in executor.map_array(function, *zip(*each, strict=True))]
    except (FailedJobError, FailedSubmissionError) as error:
        raise refusal(plan, str(error)) from None


def batch_script(plan: LaunchPlan) -> str:
    """Return the batch script that submitit would write."""
    executor = _executor(plan, _SRUN_OPTIONS, plan.run.name, plan.paths.slurm, plan.paths.slurm / "NUMBER.json")
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _executor(plan: LaunchPlan, srun: Sequence[str], name: str, folder: Path, calls: Path | None) -> Any:
    """Return submitit's executor. ``calls``: file from which the tasks read their arguments, instead of a pickle."""
    import submitit

    class Executor(submitit.SlurmExecutor):
        """Executor without submitit's check for srun before rendering; callers check where that is needed."""

        @classmethod
        def affinity(cls) -> int:
            return 2

        @property
        def _submitit_command_str(self) -> str:
            # submitit names a pickle only after sbatch has answered; if `launch` is killed before, the job lacks it
            if calls is None:
                return super()._submitit_command_str
            return f"{self.python} -u -m {node.__name__} {shlex.quote(str(calls))}"

    slurm = plan.cluster.slurm
    assert slurm is not None
    options = {name: value for name, value in slurm.options.items() if not container.is_option(name)}
    limit = options.pop("time", None)
    del options["job-name"]  # the run's name; an array has another one
    executor = Executor(folder, python=shlex.join(container.task_command(plan, os.environ, sys.executable)))
    executor.update_parameters(
        job_name=name,
        nodes=plan.cluster.nodes,  # submitit computes with it; the options, which come last, may have a range
        time=limit,
        signal_delay_s=slurm.signal_s,
        setup=[*BEFORE_SETUP, *slurm.setup, AFTER_SETUP] if slurm.setup else None,
        stderr_to_stdout=True,
        wckey=None,  # a cluster that checks keys rejects submitit's default
        additional_parameters=options,
        # srun does not inherit the core count from sbatch
        srun_args=[*srun, f"--cpus-per-task={slurm.cpus_per_node}", *container.srun_options(plan, os.environ)],
    )
    return executor


def _roots(plan: LaunchPlan) -> list[Path]:
    if isinstance(plan, RunPlan):
        return code_snapshot.roots_of_task(plan.task.target, plan.cluster.cwd)
    if (script := _batch_script_file(plan)) is not None:
        return code_snapshot.roots_of_script(script)
    if plan.command[_PROGRAM] == "-m":
        return code_snapshot.roots_of_task(plan.command[_PROGRAM + 2], plan.cluster.cwd)
    return code_snapshot.roots_of_pythonpath()


def _batch_script_file(plan: LaunchPlan) -> Path | None:
    """Return the user's script; None for a module or an installed command."""
    script = Path(plan.cluster.cwd) / plan.command[_PROGRAM]
    return script if script.is_file() and not is_command(script) else None


def _freeze(plan: P, roots: Sequence[Path]) -> P:
    """Copy the user's code and return ``plan`` with the copies in place of the originals."""
    copies = code_snapshot.copy_code(roots, plan.paths.code, plan.paths.root.parent)
    if not copies:
        return plan
    if not isinstance(plan, RunPlan):
        command = [*plan.command]
        if (script := _batch_script_file(plan)) is not None:
            copy = Path(copies[0]) / script.resolve().name
            if not copy.exists():  # ignored by git, but named by the user
                shutil.copy2(script, copy)
            command[_PROGRAM] = str(copy)
        elif command[_PROGRAM] == "-m":  # whose directory is first on sys.path, before those of PYTHONPATH
            place = Path(plan.cluster.cwd).resolve() if roots[0] in code_snapshot.roots_of_pythonpath() else roots[0]
            command[_PROGRAM + 1] = dict(zip(roots, copies, strict=True)).get(place, command[_PROGRAM + 1])
        env = plan.env
        if path := code_snapshot.moved_pythonpath(roots, copies):
            env = dataclasses.replace(env, set=env.set | {"PYTHONPATH": path})
        return dataclasses.replace(plan, command=tuple(command), env=env)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, import_from=copies))


def require_shared(directory: Path) -> None:
    """Check that the run directory is not in this machine's memory. Raises ConfigError.

    A local disk cannot be distinguished from a shared one here; `launch doctor` checks that on the nodes.
    """
    mount, kind = file_system(directory)
    if kind in OWN_MEMORY:
        raise ConfigError(
            "run.dir", directory.parent, f"is in this machine's memory ({kind} on {mount}): the nodes do not see it.",
            "Use a run.dir on a disk that the login node and all nodes share.",
        )  # fmt: skip


def require_container(plan: LaunchPlan) -> None:
    """Check what is known here of the job's container. Whether the nodes have its runtime, only they know.

    Raises:
        ConfigError: A path cannot be mounted, or the image does not exist.
    """
    container.srun_options(plan, os.environ)
    container.task_command(plan, os.environ, sys.executable)
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None or slurm.container_runtime is ContainerRuntime.pyxis:
        return
    image = container.image_of(plan)
    # a directory that is not on this host may be on the nodes
    if "://" not in image and Path(image).parent.is_dir() and not Path(image).exists():
        raise ConfigError(
            "cluster.container", image, "does not exist.",
            "Write the path of an image for apptainer, or an address such as oras://HOST/IMAGE:TAG.",
        )  # fmt: skip


# options that restrict the choice of nodes
_OF_NODES = (
    "partition", "nodes", "cpus-per-task", "mem", "gpus-per-node", "gres", "gpus", "constraint", "exclude", "nodelist",
    "exclusive", "reservation",
)  # fmt: skip


def refusal(plan: LaunchPlan, output: str) -> UserError:
    """Return the error for a job that sbatch refused, naming the config key if that is recognised.

    Args:
        output: sbatch's error text.
    """
    lines = [line.strip() for line in output.splitlines() if "error:" in line]
    message = "; ".join(re.sub(r"^sbatch: error: ", "", line) for line in lines) or " ".join(output.split())
    assert plan.cluster.slurm is not None
    options = plan.cluster.slurm.options
    for pattern, key, option, allowed in (
        (r"partition name|invalid partition", "cluster.partition", "partition", _nodes),
        (r"account|Account", "cluster.account", "account", partial(_association, "account")),
        (r"qos|QOS", "cluster.qos", "qos", partial(_association, "qos")),
        (r"gres|generic resource|GRES|gpus", "cluster.workers_per_node", "gpus-per-node", _nodes),
        (r"[Ff]eature", "cluster.constraint", "constraint", _nodes),
        (r"[Dd]ependency", "cluster.dependency", "dependency", str),
        (r"CPU count", "cluster.cpus_per_worker", "cpus-per-task", _cores),
        (r"[Mm]emory", "cluster.mem", "mem", _nodes),
        (r"--time|[Tt]ime limit", "cluster.time", "time", str),
    ):
        # Slurm calls a wrong --gres an "invalid feature" in its last line: only consider options that were set
        value = options.get(option) or (options.get("gres") if option == "gpus-per-node" else None)
        if re.search(pattern, message) and value is not None:
            if option == "gpus-per-node" and "gres" in options:
                key = "cluster.sbatch.gres"
            if option == "cpus-per-task":
                value = plan.cluster.slurm.cpus_per_node // plan.cluster.workers_per_node
            return ConfigError(key, value, f"Slurm refuses it: {message}.", allowed())
    request = ", ".join(f"{name}={value}" for name, value in options.items() if name in _OF_NODES)
    cores = "  Fewer cores per node: a lower cluster.cpus_per_worker.\n"
    return SiteError(
        f"Slurm refuses the job: {message}.\n  Requested: {request}.\n  {_nodes()}\n"
        f"{cores if re.search('[Nn]ode configuration|CPU', message) else ''}"
        "  `launch plan` with the same overrides shows the batch script."
    )


def _nodes() -> str:
    """Return the nodes by partition; empty if Slurm does not answer, whose refusal is shown anyway."""
    try:
        lines = client.ask("sinfo", "--all", "--noheader", "--format=%R: %D of %c cores, %m MB, gres %G, features %f")
    except SiteError:
        return ""
    return f"Nodes by partition: {'; '.join(lines.replace('(null)', 'none').splitlines())}."


def _cores() -> str:
    cores = [f"{p.name}: {', '.join(str(cores) for cores, _ in p.shapes)}" for p in client.partitions()]
    return f"Use fewer for each worker. A node of each partition has for all of its workers: {'; '.join(cores)}."


def _association(field: str) -> str:
    if shutil.which("sacctmgr") is None:
        return ""
    user = f"user={Submission.now().user}"
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", user, f"format={field}")
    names = {*client.ask(*command, check=False).replace(",", "\n").split()}
    return f"Yours are: {', '.join(sorted(names)) or 'none that Slurm lists'}."
