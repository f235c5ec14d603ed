"""The doctor's round: ask this host, and with Slurm its settings and its nodes; then judge."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.api import where
from launcher.cluster.slurm import client
from launcher.config import ClusterKind, Config, WandbMode
from launcher.doctor import desk, facts, job, machine, mirror, queue, storage, wires
from launcher.doctor.check import Check, failure, merge
from launcher.doctor.probe import Question
from launcher.errors import ConfigError
from launcher.paths import write_json
from launcher.placement import solve_cluster, solve_env
from launcher.plan import FORMAT, LaunchPlan, RunInfo
from launcher.site import OWN_MEMORY, WANDB_ENV, Partition, Site, allowed_env
from launcher.validate import check

_LOCAL_WITHIN_S = 240

Answer = dict[str, Any]


def examine(config: Config, say: Callable[[str], None]) -> list[Check]:
    """All checks of what the config's cluster is.

    Args:
        say: takes a line on what is being waited for.

    Raises:
        ConfigError, SiteError: the input is wrong, there is no Slurm here, or it refuses the job.
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
    if config.cluster.time is not None:  # what is wrong with it is wrong input
        solve_cluster(config.cluster, Site.of(found), job.NAME, config.strategy.kind)
    settings = client.settings()
    checks: list[Check] = []
    for name in found.name.split(","):
        told = client.partition_settings(name)
        checks += [
            queue.partition(dataclasses.replace(found, name=name), told.get("State", "UP")),
            queue.preemption(settings, told, config.cluster.grace_s),
        ]
    return [
        *checks,
        queue.time_limits(found, config.cluster),
        queue.requeue(settings),
        queue.accounting(settings, sacct=shutil.which("sacct") is not None),
    ]


def _of_hosts(config: Config, site: Site, say: Callable[[str], None]) -> list[Check]:
    run_dir = (Path(site.cwd) / config.run.dir).resolve()
    slurm = config.cluster.kind is ClusterKind.slurm
    login = facts.here()
    with _written(Path(site.cwd)) as (token, unwritten):
        try:
            with _folder_in(run_dir) as folder:
                place = facts.directory(folder)
                if slurm and place["kind"] in OWN_MEMORY:
                    return [storage.in_memory(run_dir, place, login["host"], shared=True)]
                plan = _plan(config, site, folder)
                _put(config, plan, token)
                if slurm:
                    asked = job.ask_nodes(plan, say)
                    checks = [
                        *job.silent_nodes(asked, plan.cluster.nodes, folder),
                        *_judge(config, plan, login, asked.answers, unwritten),
                    ]
                else:
                    checks = _judge(config, plan, login, _ask_here(plan), unwritten)
                return checks
        except OSError as error:
            unusable = storage.unusable(run_dir, error.strerror or str(error))
        if slurm:
            return [unusable]
        with tempfile.TemporaryDirectory() as elsewhere:
            plan = _plan(config, site, Path(elsewhere))
            _put(config, plan, token)
            checks = _judge(config, plan, login, _ask_here(plan), unwritten)
        return [unusable, *(one for one in checks if one.name != unusable.name)]


def _plan(config: Config, site: Site, folder: Path) -> LaunchPlan:
    cluster = config.cluster
    if cluster.kind is ClusterKind.slurm:
        cluster = job.small(cluster, site.partition)
    solved = solve_cluster(cluster, site, job.NAME, config.strategy.kind)
    version = metadata.version("launcher")
    run = RunInfo(name=job.NAME, id=secrets.token_hex(4), dir=str(folder), created="", version=version)
    env = solve_env(cluster, solved, site)
    return LaunchPlan(format=FORMAT, run=run, cluster=solved, env=env, command=())


def _put(config: Config, plan: LaunchPlan, token: str) -> None:
    cluster = plan.cluster
    question = Question(
        cwd=cluster.cwd, cwd_token=token, nodes=cluster.nodes, workers=cluster.workers_per_node,
        device=cluster.device.value, interface=cluster.interface, env=plan.env,
        online=config.wandb.mode is WandbMode.online,
    )  # fmt: skip
    write_json(desk.question_of(plan.paths.root), dataclasses.asdict(question))


def _ask_here(plan: LaunchPlan) -> dict[int, Answer]:
    folder = plan.paths.root
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.doctor.probe", str(folder), str(os.getpid())],
        env=allowed_env(os.environ, (*plan.env.allow, *WANDB_ENV)),
        cwd=plan.cluster.cwd,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is this process's to answer: it ends the other one, without a traceback
    )
    with suppress(subprocess.TimeoutExpired), _ended(process):
        process.wait(_LOCAL_WITHIN_S)
    return desk.answers(folder, 1)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Gone afterwards; its workers go with it, by the kernel's hand."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _judge(config: Config, plan: LaunchPlan, login: Answer, answers: dict[int, Answer], unwritten: str) -> list[Check]:
    cluster, shared = plan.cluster, plan.cluster.kind is ClusterKind.slurm
    hosts = [answer["host"] for answer in answers.values()]
    found: list[Check | None] = []
    looked = {node: answer for node, answer in answers.items() if "facts" in answer}
    for judge in (
        lambda one: machine.python(login, one),
        lambda one: machine.packages(login, one),
        machine.torch,
        lambda one: machine.gpus(one, cluster.device, cluster.workers_per_node),
    ):
        found += merge((judged for one in looked.values() if (judged := judge(one)) is not None), hosts)
    found += merge((judged for one in looked.values() for judged in machine.limits(one)), hosts)
    run_dir = plan.paths.root.parent
    found += merge(storage.run_dir(run_dir, login["host"], answers, shared=shared), hosts)
    found += merge(storage.working_directory(login["host"], unwritten, answers, shared=shared), hosts)
    found += [wires.interface(one) for one in looked.values()]
    found += [_told(one) for one in answers.values()]
    found += wires.connections(answers)
    found += wires.clocks(answers)
    found += wires.all_reduce(answers, cluster.device.value, cluster.link_gbit, hosts=cluster.nodes > 1)
    found.append(mirror.wandb(config.wandb.mode, login["packages"]["wandb"], answers.get(0, {})))
    return [one for one in found if one is not None]


def _told(answer: Answer) -> Check | None:
    """What ended a host's own look."""
    if "error" not in answer and answer.get("done"):
        return None
    problem, _, remedy = answer.get("error", "its probe did not come to its end").partition("\n")
    return failure("probe", problem, remedy.strip() or "The lines above say how far it came.", answer["host"])


@contextmanager
def _written(cwd: Path) -> Generator[tuple[str, str]]:
    """A file in ``cwd`` that other hosts look for; its name, or an empty one, and why it could not be written."""
    token, problem = f".launch-doctor-{secrets.token_hex(4)}", ""
    try:
        (cwd / token).touch()
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield "" if problem else token, problem
    finally:
        for path in (cwd / token, *storage.left_by_nodes(cwd, token)):
            path.unlink(missing_ok=True)


@contextmanager
def _folder_in(run_dir: Path) -> Generator[Path]:
    """A new directory below ``run_dir``, gone afterwards, as is what had to be made above it.

    Raises:
        OSError: it cannot be made.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=run_dir))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
