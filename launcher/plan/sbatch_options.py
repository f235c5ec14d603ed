"""Slurm submission options: ClusterConfig -> SlurmPlan. Pure."""

from __future__ import annotations

import re
from typing import Any

from launcher.config.schema import ClusterConfig, Device
from launcher.errors import ConfigError
from launcher.plan.container import solve_runtime
from launcher.plan.host import Partition
from launcher.plan.launch_plan import NodeRange, SlurmPlan

CPUS_PER_WORKER = 2  # on a CPU: the rank itself and its data loading process
# Slurm checks time limits every 30 s, so its signal can come up to 30 s early
_EARLY_S = 30
_SAVE_MARGIN_S = 15
_START_S = 30

# sbatch options with a config key of their own
_KEYS = {
    "partition": "partition", "account": "account", "qos": "qos", "time": "time", "mem": "mem",
    "constraint": "constraint", "exclude": "exclude", "dependency": "dependency", "nodes": "nodes",
    "cpus-per-task": "cpus_per_worker", "gpus-per-node": "workers_per_node", "ntasks-per-node": "workers_per_node",
    "container-image": "container",
}  # fmt: skip
# sbatch options that the launcher itself sets or relies on
_OURS = (
    "array", "chdir", "cpus-per-gpu", "error", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-socket", "open-mode", "output", "requeue", "signal", "test-only", "wait", "wrap",
)  # fmt: skip


def solve_sbatch(
    config: ClusterConfig, nodes: NodeRange, workers: int, device: Device, partition: Partition | None, name: str
) -> SlurmPlan:
    """Return the sbatch options of a job with one task per node.

    Args:
        nodes: range of hosts that the job may have.
        workers: workers per node.
        partition: its resources; None if it was not queried. Its nodes may differ: defaults follow the smallest node
            that qualifies, and a request is refused only if no node can satisfy it.
        name: name of the run and of the job.

    Raises:
        ConfigError: the request exceeds the partition, the time limit leaves no time to save, or an option is reserved
            for the launcher.
    """
    if partition is not None:
        if device is Device.cuda:
            partition = partition.with_gpus(workers)
        _require_capacity(config, nodes, workers, partition)
    signal_s = _signal_s(config)
    _require_time(config, partition)
    more = _long_options(config)
    _require_free(more)
    runtime = solve_runtime(config, more)
    more = {option: value for option, value in more.items() if value is not None and value is not False}
    cpus = workers * (config.cpus_per_worker or _default_cpus(workers, device, partition))
    options: dict[str, object] = {
        "job-name": name,
        "nodes": nodes.most if nodes.fixed else f"{nodes.least}-{nodes.most}",
        "cpus-per-task": cpus,
        "requeue": True,
    }
    if nodes.fixed:
        # with a node range Slurm computes the task count from the minimum and grants no more nodes; without this
        # option it still starts one task per node
        options["ntasks-per-node"] = 1
    if device is Device.cuda and not names_gpus(config):
        options["gpus-per-node"] = workers
    for key in ("partition", "account", "qos", "time", "mem", "constraint", "exclude", "dependency"):
        if (value := getattr(config, key)) is not None:
            options[key] = value
    return SlurmPlan(
        options=options | more,
        setup=tuple(config.setup),
        cpus_per_node=cpus,
        signal_s=signal_s,
        container=config.container,
        container_runtime=runtime,
    )


def _long_options(config: ClusterConfig) -> dict[str, Any]:
    return {str(name).replace("_", "-"): value for name, value in config.sbatch.items()}


def names_gpus(config: ClusterConfig) -> bool:
    """Return whether the user's own sbatch options select GPUs or parts of them."""
    options = _long_options(config)
    by_gres = re.search(r"\b(gpu|mps|shard)\b", str(options.get("gres") or ""))
    return by_gres is not None or any(options.get(name) for name in ("gpus", "gpus-per-task"))


def gpus_in(gres: str) -> list[tuple[str, int]]:
    """Return the (type, number) of GPUs in a list of generic resources: ``gpu:4``, ``gpu:a100:4(S:0-1)``, ``(null)``.

    The type is empty if the list does not name one.
    """
    found: list[tuple[str, int]] = []
    for entry in re.sub(r"\(.*?\)", "", gres).split(","):
        kind, *rest = entry.strip().split(":")
        if kind == "gpu":
            number = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
            found.append((rest[0] if rest else "", number))
    return found


def count_gpus(gres: str) -> int:
    """Return the number of GPUs in a list of generic resources."""
    return sum(number for _, number in gpus_in(gres))


def gpus_asked_for(config: ClusterConfig, nodes: NodeRange) -> tuple[str, int] | None:
    """Return the key of the user's own sbatch option that selects GPUs, and how many it asks for on each node.

    None without one; if it names parts of GPUs (mps, shard); and for a total on a range of nodes.

    Raises:
        ConfigError: a total that the nodes cannot share equally.
    """
    for option, value in _long_options(config).items():
        key = f"cluster.sbatch.{option}"
        if option == "gres" and (number := count_gpus(str(value))):
            return key, number
        if option in ("gpus", "gpus-per-task") and value:
            number = sum(count_gpus(f"gpu:{part}") for part in str(value).split(","))
            if option == "gpus-per-task":  # each node has one task
                return key, number
            if nodes.fixed and number % nodes.most:
                raise ConfigError(
                    key, value, f"cannot be divided by the {nodes.most} nodes of the job.",
                    "Use cluster.sbatch.gres=gpu:N, which counts for each node.",
                )  # fmt: skip
            return (key, number // nodes.most) if nodes.fixed else None
    return None


def mixed_gpus(config: ClusterConfig, partition: Partition, workers: int) -> list[str]:
    """Return the types of GPUs that a job may get on different nodes, if there are several and it selects none."""
    options = _long_options(config)
    asked = [options.get("gres", ""), *(f"gpu:{options.get(key, '')}" for key in ("gpus", "gpus-per-task"))]
    selects = any(kind for gres in asked for kind, _ in gpus_in(str(gres)))
    if selects or config.constraint or options.keys() & {"nodelist", "reservation"}:
        return []
    types = {kind for gres in partition.gres for kind, number in gpus_in(gres) if kind and number >= workers}
    return sorted(types) if len(types) > 1 else []


def _default_cpus(workers: int, device: Device, partition: Partition | None) -> int:
    """Return the cores per worker: its GPU's share of the node, or at most two on a CPU."""
    if partition is None:
        return CPUS_PER_WORKER
    if device is Device.cuda and partition.gpus:
        return max(1, min(cores // max(gpus, workers) for cores, gpus in partition.shapes if gpus))
    return max(1, min(CPUS_PER_WORKER, partition.cores // workers))


def _require_capacity(config: ClusterConfig, nodes: NodeRange, workers: int, partition: Partition) -> None:
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if nodes.most > most:
        fits = f"{nodes.least}:{most}" if nodes.least < most and not nodes.fixed else most
        raise ConfigError(
            "cluster.nodes", config.nodes, f"partition {partition.name} allows a job at most {most} nodes.",
            f"Use cluster.nodes={fits} or less, or another cluster.partition (see `sinfo`).",
        )  # fmt: skip
    if config.cpus_per_worker:
        wanted, most = config.cpus_per_worker * workers, partition.most_cores
        if wanted > most:
            raise ConfigError(
                "cluster.cpus_per_worker", config.cpus_per_worker,
                f"this needs {wanted} cores per node, and a node of partition {partition.name} has {most}.",
                f"Use cluster.cpus_per_worker={most // workers or 1} or fewer workers.",
            )  # fmt: skip


def least_s(config: ClusterConfig) -> int:
    """Return the shortest time limit, in seconds, within which a job can start and save."""
    return _signal_s(config) + _EARLY_S + _START_S


def _signal_s(config: ClusterConfig) -> int:
    return config.grace_s + _SAVE_MARGIN_S


def _require_time(config: ClusterConfig, partition: Partition | None) -> None:
    """Check that the time limit is valid and leaves time for training between the start and the signal to save."""
    try:
        limit_s = None if config.time is None else seconds(config.time)
    except ValueError:
        raise ConfigError(
            "cluster.time", config.time, "is not a time limit.", 'Write "HH:MM:SS", "D-HH:MM:SS" or minutes.'
        ) from None
    most_s = None if partition is None else partition.limit_s
    if config.time is not None and most_s is not None and (limit_s is None or limit_s > most_s):
        raise ConfigError(
            "cluster.time", config.time, f"partition {partition and partition.name} allows at most {clock(most_s)}.",
            f'Use cluster.time="{clock(most_s)}": a longer run is requeued and continues.',
        )  # fmt: skip
    key = "cluster.time"
    if limit_s is None and config.time is None and partition is not None:
        limit_s = partition.default_s if partition.default_s is not None else most_s
        key = f"cluster.time (by default that of partition {partition.name})"
    least = least_s(config)
    if limit_s is not None and limit_s < least:
        raise ConfigError(
            key, clock(limit_s),
            f"is too short for one checkpoint: the job gets the signal to save {_signal_s(config)} s before its end, "
            f"up to {_EARLY_S} s earlier if Slurm is early, and needs time to start.",
            f'Use cluster.time="{clock(-(-least // 60) * 60)}" or more, or a lower cluster.grace_s.',
        )  # fmt: skip


def _require_free(more: dict[str, object]) -> None:
    for option, value in more.items():
        key = f"cluster.sbatch.{option}"
        if option in _KEYS:
            raise ConfigError(key, value, "has its own config key.", f"Use cluster.{_KEYS[option]}.")
        if option in _OURS:
            raise ConfigError(key, value, "is set by the launcher.", "Leave it out.")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            raise ConfigError(
                key, value, "is not a long option of sbatch.", "Write its long name, such as reservation or mail-user."
            )
        if "\n" in str(value):
            raise ConfigError(key, None, "must be one line.")


def seconds(limit: str) -> int | None:
    """Return a Slurm time limit in seconds; None for unlimited.

    Args:
        limit: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. Like for sbatch, 0 is unlimited.

    Raises:
        ValueError: ``limit`` has none of these forms.
    """
    if limit.lower() in ("infinite", "unlimited", "n/a", "none", ""):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not match:
        raise ValueError(limit)
    if not limit.strip("0:-"):
        return None
    days, *parts = match.groups()
    first, second, third = (int(part) if part is not None else None for part in parts)
    assert first is not None
    if days is not None:
        return ((int(days) * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if second is None:
        return first * 60
    return first * 60 + second if third is None else (first * 60 + second) * 60 + third


def clock(limit_s: int) -> str:
    """Return seconds in Slurm's notation: 04:00:00, or 2-00:00:00."""
    days, rest = divmod(limit_s, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text
