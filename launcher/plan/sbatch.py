"""What Slurm is asked for: ClusterConfig -> SlurmPlan, with the container around a job's tasks. Pure.

The batch script itself, and with it cluster.setup, runs outside; so does whoever submits. What the tasks read and write
is mounted where it is outside: a plan holds absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from launcher.config.schema import ClusterConfig, Device
from launcher.errors import ConfigError
from launcher.plan.host import Partition
from launcher.plan.launch_plan import LaunchPlan, SlurmPlan
from launcher.plan.worlds import NodeRange

CPUS_PER_WORKER = 2  # without a GPU: the rank itself, and the process that reads its data
# Slurm looks at time limits every 30 s, and so sends the signal up to that much early
_EARLY_S = 30
_SAVE_MARGIN_S = 15
_START_S = 30

# sbatch options that have a key of their own
_KEYS = {
    "partition": "partition", "account": "account", "qos": "qos", "time": "time", "mem": "mem",
    "constraint": "constraint", "exclude": "exclude", "dependency": "dependency", "nodes": "nodes",
    "cpus-per-task": "cpus_per_worker", "gpus-per-node": "workers_per_node", "ntasks-per-node": "workers_per_node",
    "container-image": "container",
}  # fmt: skip
# and those that the launcher's own work hangs on
_OURS = (
    "array", "chdir", "cpus-per-gpu", "error", "export", "input", "job-name", "no-requeue", "ntasks", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-socket", "open-mode", "output", "requeue", "signal", "test-only", "wait", "wrap",
)  # fmt: skip


def solve_sbatch(
    config: ClusterConfig, nodes: NodeRange, workers: int, device: Device, partition: Partition | None, name: str
) -> SlurmPlan:
    """The options of one task a node.

    Args:
        nodes, workers: that the job may have; workers on each node.
        partition: what it has; None where it was not asked. Its nodes may differ: what is not said is by the least of
            those that will do, and refused is what none of them has.
        name: of the run, and so of the job.

    Raises:
        ConfigError: more than the partition has, a time limit that leaves no time to save, an option that is the
            launcher's own.
    """
    if partition is not None:
        if device is Device.cuda:
            partition = partition.with_gpus(workers)
        _require_room(config, nodes, workers, partition)
    signal_s = _signal_s(config)
    _require_time(config, partition)
    more = {str(key).replace("_", "-"): value for key, value in config.sbatch.items()}
    _require_free(more)
    require_image(config.container, more)
    more = {option: value for option, value in more.items() if value is not None and value is not False}
    cpus = workers * (config.cpus_per_worker or _default_cpus(workers, device, partition))
    options: dict[str, object] = {
        "job-name": name,
        "nodes": nodes.most if nodes.fixed else f"{nodes.least}-{nodes.most}",
        "cpus-per-task": cpus,
        "requeue": True,
    }
    if nodes.fixed:
        # of a range Slurm would count the tasks by the fewest nodes, and give no more; it starts one on each anyway
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
    )


def names_gpus(config: ClusterConfig) -> bool:
    """Whether options of the user's own say which GPUs, or which parts of them, a job gets."""
    said = {str(key).replace("_", "-"): value for key, value in config.sbatch.items() if value}
    by_gres = re.search(r"\b(gpu|mps|shard)\b", str(said.get("gres", "")))
    return by_gres is not None or bool({"gpus", "gpus-per-task"} & said.keys())


def _default_cpus(workers: int, device: Device, partition: Partition | None) -> int:
    """A worker's cores: its GPU's share of the node; on a CPU two, or what the node has for each."""
    if partition is None:
        return CPUS_PER_WORKER
    if device is Device.cuda and partition.gpus:
        return max(1, min(cores // max(gpus, workers) for cores, gpus in partition.shapes if gpus))
    return max(1, min(CPUS_PER_WORKER, partition.cores // workers))


def _require_room(config: ClusterConfig, nodes: NodeRange, workers: int, partition: Partition) -> None:
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if nodes.most > most:
        fits = f"{nodes.least}:{most}" if nodes.least < most and not nodes.fixed else most
        raise ConfigError(
            "cluster.nodes", config.nodes, f"partition {partition.name} gives a job {most} at most.",
            f"Use cluster.nodes={fits} or less, or another cluster.partition (see `sinfo`).",
        )  # fmt: skip
    if config.cpus_per_worker:
        wanted, most = config.cpus_per_worker * workers, partition.most_cores
        if wanted > most:
            raise ConfigError(
                "cluster.cpus_per_worker", config.cpus_per_worker,
                f"that is {wanted} cores a node, and a node of partition {partition.name} has {most}.",
                f"Use cluster.cpus_per_worker={most // workers or 1} or fewer workers.",
            )  # fmt: skip


def least_s(config: ClusterConfig) -> int:
    """Seconds of the shortest time limit within which a job starts and saves."""
    return _signal_s(config) + _EARLY_S + _START_S


def _signal_s(config: ClusterConfig) -> int:
    return config.grace_s + _SAVE_MARGIN_S


def _require_time(config: ClusterConfig, partition: Partition | None) -> None:
    """A job must get something done between its start and the signal to save."""
    try:
        limit_s = None if config.time is None else seconds(config.time)
    except ValueError:
        raise ConfigError(
            "cluster.time", config.time, "is no time limit.", 'Write "HH:MM:SS", "D-HH:MM:SS" or minutes.'
        ) from None
    most_s = None if partition is None else partition.limit_s
    if limit_s is not None and most_s is not None and limit_s > most_s:
        raise ConfigError(
            "cluster.time", config.time, f"partition {partition and partition.name} allows {clock(most_s)} at most.",
            f'Use cluster.time="{clock(most_s)}": a longer run goes on in the job\'s next turn.',
        )  # fmt: skip
    key = "cluster.time"
    if limit_s is None and config.time is None and partition is not None:
        limit_s = partition.default_s if partition.default_s is not None else most_s
        key = f"cluster.time (by default that of partition {partition.name})"
    least = least_s(config)
    if limit_s is not None and limit_s < least:
        raise ConfigError(
            key, clock(limit_s),
            f"is too short for one checkpoint: the job is told to save {_signal_s(config)} s before its end, Slurm may "
            f"say so {_EARLY_S} s early, and it takes a while to start.",
            f'Use cluster.time="{clock(-(-least // 60) * 60)}" or more, or a lower cluster.grace_s.',
        )  # fmt: skip


def _require_free(more: dict[str, object]) -> None:
    for option, value in more.items():
        key = f"cluster.sbatch.{option}"
        if option in _KEYS:
            raise ConfigError(key, value, "has a key of its own.", f"Use cluster.{_KEYS[option]}.")
        if option in _OURS:
            raise ConfigError(key, value, "is the launcher's own to set.", "Leave it out.")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
            raise ConfigError(
                key,
                value,
                "is no long option of sbatch.",
                "Write its long name, such as reservation or mail-user.",
            )
        if "\n" in str(value):
            raise ConfigError(key, None, "must be one line.")


def seconds(limit: str) -> int | None:
    """A time limit in Slurm's forms (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS) in seconds; None for none.

    Raises:
        ValueError: it has none of these forms.
    """
    if limit.lower() in ("infinite", "unlimited", "n/a", "none", ""):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise ValueError(limit)
    days, *parts = found.groups()
    first, second, third = (int(part) if part is not None else None for part in parts)
    assert first is not None
    if days is not None:
        return ((int(days) * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if second is None:
        return first * 60
    return first * 60 + second if third is None else (first * 60 + second) * 60 + third


def clock(limit_s: int) -> str:
    """Seconds as Slurm writes them: 04:00:00, or 2-00:00:00."""
    days, rest = divmod(limit_s, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


# the submitter's interpreter is not in there; the image's own is the first on its PATH
PYTHON = "python3"
SLURM_CONF = "/etc/slurm/slurm.conf"
# where Slurm's commands find munge
_MUNGE = "/run/munge"


def is_option(name: str) -> bool:
    """Whether an option is pyxis's: of the step, for sbatch would put the batch script into a container. --container-id
    is Slurm's own."""
    return name.startswith(("container-", "no-container-")) and name != "container-id"


def srun_options(plan: LaunchPlan, environment: Mapping[str, str]) -> list[str]:
    """Options of srun that put the tasks of ``plan`` into its container; none where it has none.

    Args:
        environment: the submitter's; SLURM_CONF is read.

    Raises:
        ConfigError: a path that no mount can name.
    """
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None:
        return []
    more = {name: value for name, value in slurm.options.items() if is_option(name)}
    mounts = [f"{path}:{path}" for path in _needed(plan)]
    # a site whose clients have no slurm.conf, or no munge, has them not: the mount may fail
    for path in (str(PurePosixPath(environment.get("SLURM_CONF") or SLURM_CONF).parent), _MUNGE):
        _require_mountable("SLURM_CONF", path)
        mounts.append(f"{path}:{path}:nofail")
    if said := more.pop("container-mounts", None):
        mounts.append(str(said))
    options = [
        f"--container-image={slurm.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.cluster.cwd}",
    ]
    # packages that lie at home for another Python must not come in
    if "container-mount-home" not in more:
        more["no-container-mount-home"] = True
    return options + [f"--{name}" if value is True else f"--{name}={value}" for name, value in more.items()]


def _needed(plan: LaunchPlan) -> list[str]:
    """The directory of all runs, which has this one with its code in it, and the working directory; of two that lie in
    one another the outer one."""
    runs, cwd = PurePosixPath(plan.run.dir).parent, PurePosixPath(plan.cluster.cwd)
    _require_mountable("run.dir", str(runs))
    _require_mountable("cluster.container (the working directory)", str(cwd))
    if cwd.is_relative_to(runs):
        return [str(runs)]
    return [str(cwd)] if runs.is_relative_to(cwd) else [str(runs), str(cwd)]


def _require_mountable(key: str, path: str) -> None:
    if re.search(r"[,:\s\\]", path) or path == "/":
        raise ConfigError(
            key, path, "cannot be mounted into a container: pyxis writes SRC:DST,SRC:DST.",
            "With cluster.container use a directory below / without comma, colon, backslash or space in its path.",
        )  # fmt: skip


def require_image(image: str | None, options: Mapping[str, object]) -> None:
    """Raises ConfigError for what is no image, and for options of pyxis's without one."""
    if image is not None and not re.fullmatch(r"[^\s\x00]+", image):
        raise ConfigError("cluster.container", repr(image), "must be an image: IMAGE:TAG, or the path of a .sqsh file.")
    for name, value in options.items():
        if name in ("container-workdir", "no-container-workdir"):
            raise ConfigError(f"cluster.sbatch.{name}", value, "is the launcher's own to set.", "Leave it out.")
        if image is None and is_option(name):
            raise ConfigError(
                f"cluster.sbatch.{name}", value, "has no effect without a container.", "Set cluster.container=IMAGE."
            )
