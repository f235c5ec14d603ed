"""Examination: collects facts of this host or, with Slurm, of its settings and nodes, and judges them.

Without a scheduler, each of several hosts examines itself, and all of them measure the links together.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import launcher
from launcher.config.choices import WandbMode
from launcher.config.schema import ClusterKind, Config, check_values
from launcher.extensions.doctor import host_checks, slurm_checks
from launcher.extensions.doctor.check import Check, CheckState, merge
from launcher.extensions.doctor.probe import (
    Answer,
    Network,
    ProbeRequest,
    answer,
    directory_facts,
    host_facts,
    read_answers,
)
from launcher.launch.local import POLL_S, create
from launcher.launch.planner import partitions_of, site_of
from launcher.launch.slurm import client
from launcher.plan.clusters import cluster_of, require_at_hand
from launcher.plan.host import OWN_MEMORY, Partition, Site
from launcher.plan.launch_plan import PLAN_FORMAT, LaunchPlan, RunInfo
from launcher.plan.placement import solve_cluster, solve_env


def examine(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Return all checks for the config's cluster.

    Args:
        say: shows one line of progress to the user.

    Raises:
        ConfigError, SiteError: The input is wrong, there is no Slurm here, it refuses the job, or hosts do not meet.
    """
    check_values(config, "cluster", "run")
    require_at_hand(config.cluster)
    if config.cluster.kind == ClusterKind.slurm:
        client.require()
    site = site_of(config.cluster)
    checks = [] if site.partition is None else _check_slurm(config, site.partition)
    return [*checks, *_check_hosts(config, site, say)]


def _check_slurm(config: Config, joined: Partition) -> list[Check]:
    """Return the checks of Slurm's settings. ``joined``: the partitions in which the job may run, as one."""
    if config.cluster.time is not None:  # raises if it is wrong
        solve_cluster(
            config.cluster, Site.of(joined, config.cluster.container), slurm_checks.NAME, config.strategy.kind
        )
    settings = client.settings()
    checks: list[Check] = []
    for partition in partitions_of(config.cluster):
        own_settings = client.partition_settings(partition.name)
        checks += [
            slurm_checks.partition(partition, own_settings.get("State", "UP")),
            slurm_checks.preemption(settings, own_settings, config.cluster.grace_s),
        ]
    return [*checks, slurm_checks.time_limits(joined, config.cluster)]


# seconds for the probe of this host
_LOCAL_WITHIN_S = 240.0


def _check_hosts(config: Config, site: Site, say: Callable[[str], None]) -> list[Check]:
    """Return the checks of this host, or of the nodes of a job."""
    run_dir = (Path(site.cwd) / config.run.dir).resolve()
    slurm, login = config.cluster.kind == ClusterKind.slurm, host_facts()
    with _token_in(Path(site.cwd)) as (token, unwritten), _folder_in(run_dir) as (folder, problem):
        unusable = [host_checks.unusable(run_dir, problem)] if problem else []
        directory = directory_facts(folder)
        if slurm and not problem and directory["kind"] in OWN_MEMORY:
            in_memory = host_checks.in_memory(run_dir, directory, shared=True)
            unusable = [dataclasses.replace(in_memory, node=login["host"])]
        if slurm and unusable:  # the directory is the only way to exchange facts with the nodes
            return unusable
        plan, met = _plan(config, site, folder), None
        if cluster_of(config.cluster.kind).typed_on_each_host:
            plan, met = _meet(plan, say)
        cluster = plan.cluster
        request = ProbeRequest(
            cwd=cluster.cwd, cwd_token=token, nodes=cluster.nodes if slurm else 1, workers=cluster.workers_per_node,
            device=cluster.device.value, interface=cluster.interface, env=plan.env,
            online=_wandb_mode(config) is WandbMode.online, met=met,
        )  # fmt: skip
        of_job = slurm_checks.container(plan)
        if any(one.state is CheckState.failure for one in of_job):
            return of_job
        if slurm:
            job = slurm_checks.run_probes(plan, request, say)
            of_job += slurm_checks.judge_job(job, cluster.nodes, folder, in_container=bool(of_job))
            answers = job.answers
        else:
            answers = _ask_here(request, folder, login["host"])
        checks = judge_hosts(config, plan, login, answers, unwritten)
    # drop the checks of the directory that was used instead
    return [*of_job, *unusable, *(one for one in checks if not unusable or one.name != unusable[0].name)]


def _meet(plan: LaunchPlan, say: Callable[[str], None]) -> tuple[LaunchPlan, Network]:
    """Wait until the command was typed on the other hosts too. Return the plan with their number, and the network."""
    directory = dataclasses.replace(plan.run, dir=str(plan.paths.root / slurm_checks.NAME))
    plan_of_directory, make = dataclasses.replace(plan, run=directory), partial(create, config_yaml="")
    met, peers = cluster_of(plan.cluster.kind).start(plan_of_directory, make, None, say)
    peers.ended({})  # what follows needs torch's connections only
    while not peers.complete():
        peers.listen(POLL_S)
    peers.conclude()
    place = met.cluster.place
    assert place is not None  # it has met the others
    # the doctor's directory is its own on each host
    return dataclasses.replace(met, run=plan.run), Network(place.node, met.cluster.nodes, {}, place.store)


def _ask_here(request: ProbeRequest, folder: Path, host: str) -> dict[int, Answer]:
    """Return the answer of this host's probe, without "done" if it does not end in time.

    It runs in a thread that may outlive the call: nothing ends a system call of a dead network disk.
    """

    def probe() -> None:
        with suppress(OSError):  # the folder cannot be written, or was removed after a Ctrl-C
            answer(request, folder, 0, host)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_LOCAL_WITHIN_S)
    return read_answers(folder, 1) or {0: {"host": host}}


def _plan(config: Config, site: Site, folder: Path) -> LaunchPlan:
    """Return the plan of the job that runs the probes, with ``folder`` as its directory."""
    cluster = config.cluster
    if cluster.kind == ClusterKind.slurm:
        cluster = slurm_checks.probe_options(cluster, site.partition)
    solved = solve_cluster(cluster, site, slurm_checks.NAME, config.strategy.kind)
    version = launcher.__version__
    run = RunInfo(name=slurm_checks.NAME, id=secrets.token_hex(4), dir=str(folder), created="", version=version)
    env = solve_env(solved, site)
    return LaunchPlan(format=PLAN_FORMAT, run=run, cluster=solved, env=env, command=())


@contextmanager
def _token_in(cwd: Path) -> Generator[tuple[str, str]]:
    """Write a file in ``cwd`` for which other hosts look. Yield (name, ""), or ("", reason) if it cannot be written."""
    token, problem = f".launch-doctor-{secrets.token_hex(4)}", ""
    try:
        (cwd / token).touch()
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        yield "" if problem else token, problem
    finally:
        for path in (cwd / token, *sorted(cwd.glob(f"{token}.node*"))):  # the hosts that see it write beside it
            path.unlink(missing_ok=True)


@contextmanager
def _folder_in(run_dir: Path) -> Generator[tuple[Path, str]]:
    """Yield a temporary directory in ``run_dir`` and "", or one in this machine's temporary space and the reason.

    The directory is removed afterwards, with any parent that had to be made.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    folder, problem = run_dir / f".doctor-{secrets.token_hex(4)}", ""
    try:  # a Ctrl-C may come at any time
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            problem, folder = error.strerror or str(error), Path(tempfile.mkdtemp(prefix="launch-doctor-"))
        yield folder, problem
    finally:
        with suppress(OSError):  # the probe's thread may still write files there, which would hinder the removal
            folder = folder.rename(folder.with_name(f"{folder.name}.removed"))
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _wandb_mode(config: Config) -> WandbMode:
    return config.wandb.mode if "wandb" in config.trackers else WandbMode.disabled


def judge_hosts(
    config: Config, plan: LaunchPlan, login: Answer, answers: dict[int, Answer], unwritten: str
) -> list[Check]:
    """Return the checks of the hosts; results that are equal on all hosts occur once.

    Args:
        login: facts of the host on which the doctor runs.
        answers: answers by node, where there is one.
        unwritten: why ``login`` could not write to the working directory; empty if it could.
    """
    cluster, run_dir = plan.cluster, plan.paths.root.parent
    with_facts = {node: answer for node, answer in answers.items() if "facts" in answer}
    hosts = [answer["host"] for answer in answers.values()]
    # in a container all nodes use the image's Python, so compare them with the first node
    first = next(iter(with_facts.values()), None)
    model = first["facts"] if first is not None and config.cluster.container else login
    submitter = login["host"] if plan.cluster.kind == ClusterKind.slurm else None

    def on_each(check: Callable[[Answer], Iterable[Check]], answers: dict[int, Answer] = with_facts) -> list[Check]:
        return merge(((answer["host"], one) for answer in answers.values() for one in check(answer)), hosts)

    return [
        *on_each(partial(host_checks.python, model)),
        *on_each(partial(host_checks.packages, model)),
        *on_each(host_checks.torch),
        *on_each(partial(host_checks.gpus, cluster.device, cluster.workers_per_node)),
        *on_each(partial(host_checks.compiler, cluster.device, config.train.compile)),
        *on_each(partial(host_checks.infiniband, cluster.device, cluster.nodes)),
        *on_each(host_checks.limits),
        *on_each(partial(host_checks.run_dir, run_dir, submitter, with_facts)),
        *on_each(partial(host_checks.working_directory, submitter, unwritten)),
        *on_each(host_checks.named_interfaces),
        *host_checks.addresses(with_facts),
        *on_each(host_checks.unfinished, answers),
        *host_checks.connections(with_facts),
        *host_checks.clocks(with_facts),
        *host_checks.links(with_facts, cluster.device.value, hosts=cluster.nodes),
        *host_checks.wandb(_wandb_mode(config), login["packages"]["wandb"], answers.get(0, {})),
    ]
