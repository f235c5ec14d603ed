"""Examination: collects facts of this host or, with Slurm, of its settings and nodes, and judges them."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from launcher.config.schema import ClusterKind, Config, WandbMode
from launcher.doctor import host_checks, host_facts, slurm_checks
from launcher.doctor.check import Check, failure, merge
from launcher.doctor.host_facts import Answer
from launcher.doctor.probe import Question
from launcher.errors import ConfigError
from launcher.launch.planner import partitions, where
from launcher.launch.slurm import client
from launcher.plan.host import OWN_MEMORY, WANDB_ENV, Partition, Site, allowed_env
from launcher.plan.launch_plan import FORMAT, LaunchPlan, RunInfo
from launcher.plan.placement import solve_cluster, solve_env
from launcher.plan.validation import check
from launcher.rundir.files import write_json


def judge(config: Config, plan: LaunchPlan, login: Answer, answers: dict[int, Answer], unwritten: str) -> list[Check]:
    """Return the checks of the hosts; results that are equal on all hosts occur once.

    Args:
        login: facts of the host on which the doctor runs.
        answers: answers by node, where there is one.
        unwritten: why ``login`` could not write to the working directory; empty if it could.
    """
    cluster, shared = plan.cluster, plan.cluster.kind is ClusterKind.slurm
    if not answers and not shared:  # with Slurm, the checks of the job give the reason
        remedy = "Its own words are above this; try `python -c 'import launcher.doctor.probe'`."
        return [failure("probe", "this machine's probe gave no answer", remedy)]
    run_dir = plan.paths.root.parent
    looked = {node: answer for node, answer in answers.items() if "facts" in answer}
    each = list(looked.values())
    # in a container all nodes use the image's Python, so compare them with the first node
    model = each[0]["facts"] if each and config.cluster.container else login
    several = [
        [host_checks.python(model, one) for one in each],
        [host_checks.packages(model, one) for one in each],
        [torch for one in each if (torch := host_checks.torch(one)) is not None],
        [host_checks.gpus(one, cluster.device, cluster.workers_per_node) for one in each],
        [limit for one in each for limit in host_checks.limits(one)],
        host_checks.run_dir(run_dir, login["host"], looked, shared=shared),
        host_checks.working_directory(login["host"], unwritten, looked, shared=shared),
    ]
    hosts = [one["host"] for one in answers.values()]
    wandb = host_checks.wandb(config.wandb.mode, login["packages"]["wandb"], answers.get(0, {}))
    return [
        *(check for checks in several for check in merge(checks, hosts)),
        *host_checks.interfaces(looked),
        *(told for one in answers.values() if (told := _unfinished(one)) is not None),
        *host_checks.connections(looked),
        *host_checks.clocks(looked),
        *host_checks.all_reduce(looked, cluster.device.value, cluster.link_gbit, hosts=cluster.nodes > 1),
        *([] if wandb is None else [wandb]),
    ]


def _unfinished(answer: Answer) -> Check | None:
    """Return a failure if a host's probe did not finish, else None."""
    if "error" not in answer and answer.get("done"):
        return None
    problem, _, remedy = answer.get("error", "its probe did not come to its end").partition("\n")
    return failure("probe", problem, remedy.strip() or "The lines above say how far it came.", answer["host"])


_LOCAL_WITHIN_S = 240


def examine(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Return all checks for the config's cluster.

    Args:
        say: shows one line of progress to the user.

    Raises:
        ConfigError, SiteError: The input is wrong, there is no Slurm here, or it refuses the job.
    """
    check(config)
    if config.cluster.kind is ClusterKind.hosts:
        raise ConfigError(
            "cluster", "hosts", "`launch doctor` looks at one machine, or at Slurm's nodes.",
            "Type it with cluster=local on each of the hosts.",
        )  # fmt: skip
    if config.cluster.kind is ClusterKind.slurm:
        client.require()
    site = where(config.cluster)
    checks = [] if site.partition is None else _of_slurm(config, site.partition)
    return [*checks, *_of_hosts(config, site, say)]


def _of_slurm(config: Config, found: Partition) -> list[Check]:
    if config.cluster.time is not None:  # raises if it is wrong
        solve_cluster(config.cluster, Site.of(found, config.cluster.container), slurm_checks.NAME, config.strategy.kind)
    settings = client.settings()
    checks: list[Check] = []
    for one in partitions(config.cluster):
        told = client.partition_settings(one.name)
        checks += [
            slurm_checks.partition(one, told.get("State", "UP")),
            slurm_checks.preemption(settings, told, config.cluster.grace_s),
        ]
    return [
        *checks,
        *slurm_checks.gpus(found, metadata.version("torch")),
        slurm_checks.time_limits(found, config.cluster),
        slurm_checks.requeue(settings),
        slurm_checks.accounting(settings, sacct=shutil.which("sacct") is not None),
    ]


def _of_hosts(config: Config, site: Site, say: Callable[[str], None]) -> list[Check]:
    run_dir = (Path(site.cwd) / config.run.dir).resolve()
    slurm, login = config.cluster.kind is ClusterKind.slurm, host_facts.here()
    with _written(Path(site.cwd)) as (token, unwritten), _folder_in(run_dir) as (folder, problem):
        unusable = [host_checks.unusable(run_dir, problem)] if problem else []
        place = host_facts.directory(folder)
        if slurm and not problem and place["kind"] in OWN_MEMORY:
            unusable = [host_checks.in_memory(run_dir, place, login["host"], shared=True)]
        if slurm and unusable:  # the directory is the only way to exchange facts with the nodes
            return unusable
        plan = _put(config, site, folder, token)
        asked = slurm_checks.ask_nodes(plan, say) if slurm else None
        answers = _ask_here(plan) if asked is None else asked.answers
        of_job = [] if asked is None else slurm_checks.judge(asked, plan.cluster.nodes, folder)
        found = judge(config, plan, login, answers, unwritten)
    # drop the checks of the directory that was used instead
    return [*of_job, *unusable, *(one for one in found if not unusable or one.name != unusable[0].name)]


def _plan(config: Config, site: Site, folder: Path) -> LaunchPlan:
    cluster = config.cluster
    if cluster.kind is ClusterKind.slurm:
        cluster = slurm_checks.small(cluster, site.partition)
    solved = solve_cluster(cluster, site, slurm_checks.NAME, config.strategy.kind)
    version = metadata.version("launcher")
    run = RunInfo(name=slurm_checks.NAME, id=secrets.token_hex(4), dir=str(folder), created="", version=version)
    env = solve_env(cluster, solved, site)
    return LaunchPlan(format=FORMAT, run=run, cluster=solved, env=env, command=())


def _put(config: Config, site: Site, folder: Path, token: str) -> LaunchPlan:
    """Write the question into ``folder``. Return the plan of the job that answers it."""
    plan = _plan(config, site, folder)
    cluster = plan.cluster
    question = Question(
        cwd=cluster.cwd, cwd_token=token, nodes=cluster.nodes, workers=cluster.workers_per_node,
        device=cluster.device.value, interface=cluster.interface, env=plan.env,
        online=config.wandb.mode is WandbMode.online,
    )  # fmt: skip
    write_json(host_facts.question_of(folder), dataclasses.asdict(question))
    return plan


def _ask_here(plan: LaunchPlan) -> dict[int, Answer]:
    folder = plan.paths.root
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.doctor.probe", str(folder), str(os.getpid())],
        env=allowed_env(os.environ, (*plan.env.allow, *WANDB_ENV)),
        cwd=plan.cluster.cwd,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # only this process handles a Ctrl-C; it kills the probe, without a traceback
    )
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOCAL_WITHIN_S)
    finally:  # the kernel kills its workers with it (die_with_parent)
        process.kill()
        process.wait()
    return host_facts.answers(folder, 1)


@contextmanager
def _written(cwd: Path) -> Generator[tuple[str, str]]:
    """Write a file in ``cwd`` for which other hosts look. Yield (name, ""), or ("", reason) if it cannot be written."""
    token, problem = f".launch-doctor-{secrets.token_hex(4)}", ""
    try:
        (cwd / token).touch()
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield "" if problem else token, problem
    finally:
        for path in (cwd / token, *host_checks.left_by_nodes(cwd, token)):
            path.unlink(missing_ok=True)


@contextmanager
def _folder_in(run_dir: Path) -> Generator[tuple[Path, str]]:
    """Yield a temporary directory in ``run_dir`` and "", or one in this machine's temporary space and the reason.

    The directory is removed afterwards, with any parent that had to be made.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    problem = ""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=run_dir))
    except OSError as error:
        problem, folder = error.strerror or str(error), Path(tempfile.mkdtemp(prefix="launch-doctor-"))
    try:
        yield folder, problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
