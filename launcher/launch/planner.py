"""Planner: makes the plan of a job on the machine or cluster on which it will run."""

from __future__ import annotations

import dataclasses
import json
import netrc
import os
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from launcher.config.choices import Tracker, WandbMode
from launcher.config.schema import ClusterConfig, ClusterKind, Compress, Config, Device, PrecisionKind, RunConfig, Sync
from launcher.errors import ConfigError, SiteError, UserError
from launcher.plan import host
from launcher.plan.callback_plan import require_variables, solve_callbacks
from launcher.plan.host import Partition, Site, batch_env
from launcher.plan.initial_weights import InitialWeights, find_weights
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.sync_policy import SHARDED
from launcher.plan.task_inspection import InspectionRequest, describe_task, run_probe, weigh_memory
from launcher.plan.tracker_plan import require_trackers
from launcher.process import RUN_DIR, RUN_ID

T = TypeVar("T")

ANY_NUMBER = 2**62  # samples, enough for every window


class Once:
    """Cache that calls a function once for equal arguments; the jobs of a sweep share most questions."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Any, UserError | None]] = {}

    def __call__(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        key = repr((function, arguments, named))
        if key not in self._answers:
            try:
                self._answers[key] = function(*arguments, **named), None
            except UserError as error:  # the same error holds for every later call
                self._answers[key] = None, error
        result, error = self._answers[key]
        if error is not None:
            raise error
        return result


def plan_job(config: Config, once: Once | None = None) -> RunPlan:
    """Return the plan of `launch train` for this config. Inspects task and machine; starts and writes nothing.

    Args:
        once: cache shared with other jobs that are planned at the same time.

    Raises:
        ConfigError, TaskError, SiteError: The input is wrong.
    """
    once = once or Once()
    site = once(site_of, config.cluster)
    run = new_run(config.run, task_stem(config), site.cwd)
    require_secrets(config)
    # report errors that no task could cure before the task is inspected, which may take seconds
    of_streams = dataclasses.replace(config, train=dataclasses.replace(config.train, data_shards=None))
    cluster = solve(of_streams, site, TaskPlan.unknown(ANY_NUMBER), run).cluster
    require_trackers(config, os.environ, site.cwd)  # the values are in their bounds
    if cluster.gpu is None and config.precision.kind is PrecisionKind.auto and cluster.kind is ClusterKind.local:
        site = dataclasses.replace(site, bf16=once(_format_support, PrecisionKind.bf16, cluster.device)[0])
    initial = once(initial_weights, config, site.cwd)
    task = once(describe_task, InspectionRequest.of(config, site.cwd, initial))
    plan = with_sync_policy(dataclasses.replace(solve(config, site, task, run), initial=initial), config)
    return plan.with_notes(emulation_notes(plan, once))


def initial_weights(config: Config, cwd: str) -> InitialWeights | None:
    """Return the weights that ``checkpoint.init_from`` names; None without that key.

    Raises:
        ConfigError: there are none.
    """
    word = config.checkpoint.init_from
    return None if word is None else find_weights(word, Path(cwd) / config.run.dir, Path(cwd))


def emulation_notes(plan: RunPlan, once: Once | None = None) -> list[str]:
    """Return a warning if the job runs on this machine in a format that it emulates."""
    kind = plan.precision.kind
    if plan.cluster.kind is not ClusterKind.local or plan.cluster.gpu is not None or kind not in host.NARROW:
        return []
    is_native, factor = (once or Once())(_format_support, kind, plan.cluster.device, measure=True)
    return [] if is_native or factor is None else [host.emulation_warning(kind, "this machine", factor)]


def _format_support(kind: PrecisionKind, device: Device, *, measure: bool = False) -> tuple[bool | None, float | None]:
    """Return (native, slowdown) of ``kind`` on this machine; None for an unknown value.

    Args:
        measure: also measure the slowdown of an emulated format: time of a matrix product relative to fp32.

    torch is only imported, in another process, if the answer is in doubt or a measurement is needed.
    """
    quick = host.computes(kind, device, os.environ)
    if quick is not None and (quick or not measure):
        return quick, None
    request = {"kind": kind.value, "device": device.value, "measure": measure}
    answer = run_probe("launcher.train.precision", json.dumps(request)) or {}
    return answer.get("native", quick), answer.get("slowdown")


def with_sync_policy(plan: RunPlan, config: Config) -> RunPlan:
    """Return ``plan`` with the sync policy that fits into memory, if the user left the choice to the launcher.

    A plan for a GPU that the user names has the memory of each policy, whatever the strategy. If parts of the model are
    frozen, the payload of each policy depends on where gradients flow, so windows are run.
    """
    sharded = plan.strategy.kind in SHARDED
    choose = sharded and config.strategy.sync is Sync.auto
    # the memory of a named GPU is compared under every strategy; the factors of PowerSGD are not predicted
    named = config.cluster.gpu is not None and config.strategy.compress is not Compress.powersgd
    if not (choose or named or (sharded and plan.task.frozen_parameters)):
        return plan
    most, *fewer = (weigh_memory(world, choose=choose) for world in plan.worlds())
    return most.with_fewer(fewer)


def require_secrets(config: Config) -> None:
    """Check that W&B will find its key, and callbacks the environment variables that they are to read, if they need
    one.

    Raises:
        ConfigError, SiteError: they will not.
    """
    # a Slurm job finds a key in .netrc, or in a variable that the user lists in cluster.env
    batch = config.cluster.kind is ClusterKind.slurm
    env = batch_env(os.environ, ("HOME", *config.cluster.env)) if batch else os.environ
    if Tracker.wandb in config.trackers and config.wandb.mode is WandbMode.online:
        require_wandb_key(env)
    if config.cluster.kind is not ClusterKind.hosts:  # there only the first host reports
        require_variables(solve_callbacks(config.callbacks), env, passed_on=batch)


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

    if config.kind is not ClusterKind.slurm or not client.available():
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
    """Return a new run's name, id and directory. A random suffix separates runs that start in the same second."""
    now = datetime.now(UTC)
    name = config.name or f"{stem or 'run'}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return RunInfo(
        name=name,
        id=secrets.token_hex(4),
        dir=str((Path(cwd) / config.dir / name).resolve()),
        created=now.isoformat(timespec="seconds"),
        version=metadata.version("launcher"),
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
        version=metadata.version("launcher"),
    )


def require_wandb_key(env: Mapping[str, str]) -> None:
    """Check that wandb.mode=online has a key, in ``env`` or in .netrc for the server's host. Raises SiteError."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(env.get("NETRC") or Path(env.get("HOME", "~")).expanduser() / ".netrc")
    try:
        key = netrc.netrc(file).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        key = None
    if key is None:
        raise SiteError(
            f"wandb.mode=online: there is no key for {host}, neither in WANDB_API_KEY nor in {file}.\n"
            "  Run `wandb login`, or use wandb.mode=offline and `wandb sync` later."
        )
