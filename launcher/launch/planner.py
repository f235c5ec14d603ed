"""Planner: makes the plan of a job on the machine or cluster on which it will run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import launcher
from launcher.config.key_facts import tokens_in
from launcher.config.schema import (
    ClusterConfig,
    ClusterKind,
    Config,
    Device,
    PrecisionKind,
    RunConfig,
    StrategyKind,
    Sync,
)
from launcher.errors import ConfigError, UserError
from launcher.launch.credentials import require_credentials
from launcher.plan import host
from launcher.plan.batch import before_tokens, with_any_global_size
from launcher.plan.float_format import float_format
from launcher.plan.gpus import find_gpu
from launcher.plan.host import Partition, Site
from launcher.plan.initial_weights import InitialWeights, find_weights
from launcher.plan.launch_plan import RunInfo, node_range
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.strategy_choice import choose_strategy
from launcher.plan.sync_policy import SHARDED
from launcher.plan.task_inspection import (
    Inspection,
    InspectionRequest,
    InspectionServer,
    describe_task,
    new_inspection,
    run_probe,
    weigh_memory,
)
from launcher.plan.windows import ANY_NUMBER
from launcher.process import RUN_DIR, RUN_ID
from launcher.quantities import count
from launcher.trackers.installed import require_trackers
from launcher.trackers.wandb_tracker import trial_of_wandb

T = TypeVar("T")
_MOST_AT_ONCE = 4  # tasks that are inspected


class CallCache:
    """Cache that calls a function once for equal arguments; the jobs of a sweep share most questions."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Any, UserError | None]] = {}
        self._locks: dict[str, threading.Lock] = {}

    def __call__(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        key = repr((function, arguments, named))
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._answers:
                try:
                    self._answers[key] = function(*arguments, **named), None
                except UserError as error:  # the same error holds for every later call
                    self._answers[key] = None, error
        result, error = self._answers[key]
        if error is not None:
            raise error
        return result


def plan_job(
    config: Config,
    cache: CallCache | None = None,
    inspection: Inspection | None = None,
    *,
    starts: bool = True,
    weighs: bool = False,
) -> RunPlan:
    """Return the plan of `launch train` for this config. Inspects task and machine; starts and writes nothing.

    Args:
        cache: shared with other jobs that are planned at the same time.
        inspection: of the job's task; None: one that ends with the call.
        starts: whether the job is about to start: False for `launch plan`.
        weighs: whether the plan is to have the predicted memory, whatever the strategy.

    Raises:
        ConfigError, TaskError, SiteError: The input is wrong.
    """
    cache = cache or CallCache()
    with new_inspection(inspection) as asked:
        if config.strategy.kind is StrategyKind.auto:
            plan = choose_strategy(config, lambda each: _plan_strategy(each, cache, asked, starts=starts, weighs=True))
        else:
            plan = _plan_strategy(config, cache, asked, starts=starts, weighs=weighs)
        return plan.with_notes(asked.slow_notes())


def _plan_strategy(
    config: Config, cache: CallCache, inspection: Inspection, *, starts: bool, weighs: bool = False
) -> RunPlan:
    """Return the plan of a config that names its strategy.

    Args:
        weighs: whether the plan is to have the predicted memory, whatever the strategy.
    """
    job = _before_inspection(config, cache, starts=starts)
    task = cache(describe_task, job.request, inspection, limit_s=job.config.train.hang_timeout)
    if not starts:
        task = _with_a_window(task, job.window, job.notes)
    plan = dataclasses.replace(solve(job.config, job.site, task, job.run), initial=job.initial)
    plan = with_predictions(plan, job.config, inspection, starts=starts, weighs=weighs)
    return plan.with_notes([*job.notes, *emulation_notes(plan, cache)])


def global_sizes(configs: Iterable[Config], cache: CallCache) -> list[int]:
    """Return the global batch, in samples or tokens, of each config that may have a plan for showing. It inspects no
    task."""
    sizes: list[int] = []
    for config in configs:
        with suppress(UserError):  # the plan says it again
            window = _before_inspection(config, cache, starts=False).window
            sizes.append(window or tokens_in(config.batch.global_tokens or 0) or 0)
    return sizes


def plan_jobs(
    configs: Sequence[Config],
    cache: CallCache,
    *,
    starts: bool = True,
    weighs: bool = False,
    planned: Callable[[int, RunPlan | UserError], object] | None = None,
) -> list[RunPlan | UserError]:
    """Return what ``plan_job`` returns or raises for each config. Each distinct task is built once, several at a time.

    Args:
        planned: called with the number of each config as soon as its plan, or its error, is known. It may raise an
            error, which ends the others.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    tasks: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        tasks.setdefault(repr(config.task), []).append(number)
    plans: dict[int, RunPlan | UserError] = {}
    workers = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool, InspectionServer(several=len(tasks) > 1) as server:

        def plan_with(numbers: Sequence[int]) -> None:
            with Inspection(server) as inspection:
                for number in numbers:
                    try:
                        plans[number] = plan_job(configs[number], cache, inspection, starts=starts, weighs=weighs)
                    except UserError as error:
                        plans[number] = error
                    if planned is not None:
                        planned(number, plans[number])

        try:
            for done in as_completed([pool.submit(plan_with, numbers) for numbers in tasks.values()]):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [plans[number] for number in range(len(configs))]


@dataclass(frozen=True)
class _Ready:
    """Job of which all is known but the task.

    Attributes:
        config: with a batch and a cluster for a plan that starts nothing.
    """

    config: Config
    site: Site
    run: RunInfo
    initial: InitialWeights | None
    request: InspectionRequest
    window: int  # 0: in tokens, of which a sample has a number that is not known
    notes: list[str]


def _before_inspection(config: Config, cache: CallCache, *, starts: bool) -> _Ready:
    """Return what is known of the job before its task is inspected.

    Raises:
        UserError: no task could cure that.
    """
    notes: list[str] = []
    if not starts and config.cluster.kind == ClusterKind.local and node_range(config.cluster.nodes).most > 1:
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, kind=ClusterKind.elsewhere))
    site = cache(site_of, config.cluster) if starts else _site_if_known(config.cluster, cache, notes)
    if config.cluster.kind == ClusterKind.local and config.sweep.at_once is not None:
        site = site.share(config.sweep.at_once, config.cluster.device)
    run = new_run(config.run, task_stem(config), site.cwd)
    require_credentials(config)
    try:
        unknown = _solve_any_task(config, site, run)
    except ConfigError as error:
        if not error.key.startswith("batch.global_size") or config.cluster.kind != ClusterKind.elsewhere:
            raise
        batch, note = with_any_global_size(config.batch, error)
        config = dataclasses.replace(config, batch=batch)
        notes.append(note)
        unknown = _solve_any_task(config, site, run)
    cluster = unknown.cluster
    require_trackers(config, os.environ)
    if (added := float_format(config)) is not None:
        added.check_machine(cluster)
    if cluster.gpu is None and config.precision.kind is PrecisionKind.auto and cluster.kind == ClusterKind.local:
        site = dataclasses.replace(site, bf16=cache(_computes, PrecisionKind.bf16, cluster.device))
    initial = cache(initial_weights, config, site.cwd)
    request = InspectionRequest.of(config, site.cwd, initial)
    window = unknown.batch.global_size if config.batch.global_tokens is None else 0
    return _Ready(config, site, run, initial, request, window, notes)


def _site_if_known(config: ClusterConfig, cache: CallCache, notes: list[str]) -> Site:
    """Return the site of a plan that starts nothing: if Slurm does not answer, its partitions are not considered."""
    from launcher.launch.slurm.client import SlurmSilent

    try:
        return cache(site_of, config)
    except SlurmSilent as error:
        reason = str(error).splitlines()[0].rstrip(".")
        notes.append(f"{reason}. The plan was made without the partitions of the cluster.")
        return Site.here()


def _with_a_window(task: TaskPlan, global_size: int, notes: list[str]) -> TaskPlan:
    """Return ``task`` with data for one window of a plan that starts nothing, if its data is too small for that."""
    if task.samples is None or not 0 < task.samples < global_size:
        return task
    notes.append(
        f"The task has {count(task.samples, 'sample')}, fewer than one window of {global_size}: the plan assumes one "
        "window an epoch, and the job cannot start."
    )
    return dataclasses.replace(task, samples=global_size)


def _solve_any_task(config: Config, site: Site, run: RunInfo) -> RunPlan:
    """Return the plan of a task that is not inspected."""
    train, batch = dataclasses.replace(config.train, data_shards=None), before_tokens(config.batch)
    of_streams = dataclasses.replace(config, train=train, batch=batch)
    return solve(of_streams, site, TaskPlan.unknown(ANY_NUMBER), run)


def initial_weights(config: Config, cwd: str) -> InitialWeights | None:
    """Return the weights that ``checkpoint.init_from`` names; None without that key.

    Raises:
        ConfigError: there are none.
    """
    word = config.checkpoint.init_from
    return None if word is None else find_weights(word, Path(cwd) / config.run.dir, Path(cwd))


def emulation_notes(plan: RunPlan, cache: CallCache | None = None) -> list[str]:
    """Return a warning if this machine, or the GPU that the plan is for, emulates the job's format."""
    kind, gpu = plan.precision.kind, plan.cluster.gpu
    if gpu is not None and kind is PrecisionKind.bf16 and find_gpu(gpu).bf16 is None:
        return [
            f"precision=bf16: {gpu.upper()} has no units for it and emulates it in fp32. precision=fp16 uses its "
            "tensor cores; precision=auto takes fp32."
        ]
    if plan.cluster.kind != ClusterKind.local or gpu is not None or kind not in host.NARROW:
        return []
    native = (cache or CallCache())(_computes, kind, plan.cluster.device)
    return [host.emulation_warning(kind, "this machine")] if native is False else []


def _computes(kind: PrecisionKind, device: Device) -> bool | None:
    """Return whether this machine computes in ``kind`` natively; None if unknown. If only torch can tell, another
    process imports it."""
    if (quick := host.computes(kind, device, os.environ)) is not None:
        return quick
    request = {"kind": kind.value, "device": device.value}
    return (run_probe("launcher.train.precision", json.dumps(request)) or {}).get("native")


def with_predictions(
    plan: RunPlan, config: Config, inspection: Inspection | None = None, *, starts: bool = True, weighs: bool = False
) -> RunPlan:
    """Return ``plan`` with a prediction of its windows, and with the sync policy that fits into memory, if the user
    left the choice to the launcher.

    A trace takes some seconds: a job that starts has none where nothing depends on it.

    Args:
        inspection: of the job's task; None: one that ends with the call.
        starts: whether the job is about to start, and not only shown.
        weighs: whether the plan is to have the memory of each policy in any case.
    """
    if plan.sites is not None:  # a forecast is of ranks that all communicate with each other
        return plan
    choose = plan.strategy.kind in SHARDED and config.strategy.sync is Sync.auto
    if not _requires_forecasts(plan, config, starts=starts, weighs=weighs):
        return plan
    most, *fewer = (weigh_memory(world, inspection, choose=choose) for world in plan.worlds())
    return most.with_fewer(fewer)


def _requires_forecasts(plan: RunPlan, config: Config, *, starts: bool, weighs: bool) -> bool:
    """Return whether windows of the plan's task are traced: to choose a policy, to know the payload of each policy
    where parts of the model are frozen, or because its memory is what the user wants to know."""
    is_sharded = plan.strategy.kind in SHARDED
    is_shown = not starts and (is_sharded or plan.cluster.device is Device.cuda)
    is_predictable = not config.strategy.compress.keeps_residue  # whose bytes are not
    if (weighs or is_shown or config.cluster.gpu is not None) and is_predictable:
        return True
    return is_sharded and (config.strategy.sync is Sync.auto or plan.task.frozen_parameters > 0)


def task_stem(config: Config) -> str:
    """Return the stem of a task's run names: ``bytes_gpt`` for ``BytesGPT``."""
    class_name = str(config.task.get("_target_", "")).rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()


def site_of(config: ClusterConfig) -> Site:
    """Return the site on which the job will run: this machine, or the nodes of Slurm partitions.

    Raises:
        ConfigError: There is no such partition.
    """
    from launcher.launch.slurm import client

    if config.kind != ClusterKind.slurm or not client.available():
        return Site.here()
    return Site.of(Partition.joined(partitions_of(config)), config.container)


def partitions_of(config: ClusterConfig) -> list[Partition]:
    """Return the Slurm partitions in which a job may run; Slurm takes the one that is free first.

    Raises:
        ConfigError: There is no such partition.
    """
    from launcher.launch.slurm import client

    existing = client.partitions()
    wanted = existing[0].name if config.partition is None else config.partition
    chosen = [partition for name in wanted.split(",") for partition in existing if partition.name == name]
    if len(chosen) < len(wanted.split(",")):
        raise ConfigError(
            "cluster.partition", wanted, "Slurm has no such partition.",
            f"There are: {', '.join(partition.name for partition in existing)}.",
        )  # fmt: skip
    return chosen


def new_run(config: RunConfig, stem: str, cwd: str) -> RunInfo:
    """Return a new run's name, id and directory. A random suffix separates runs that start in the same second.

    A trial of `wandb agent` has the id under which its sweep knows it.
    """
    now = datetime.now(UTC)
    name = config.name or f"{stem or 'run'}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return RunInfo(
        name=name,
        id=(trial_of_wandb(os.environ) and os.environ.get("WANDB_RUN_ID")) or secrets.token_hex(4),
        dir=str((Path(cwd) / config.dir / name).resolve()),
        created=now.isoformat(timespec="seconds"),
        version=launcher.__version__,
    )


def run_of_script(env: Mapping[str, str]) -> RunInfo | None:
    """Return name, id and directory of the run that the agent which started this process belongs to; None without
    one."""
    if RUN_DIR not in env:
        return None
    return RunInfo(
        name=Path(env[RUN_DIR]).name,
        id=env[RUN_ID],
        dir=env[RUN_DIR],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=launcher.__version__,
    )
