"""Cluster solver: ClusterConfig and site -> ClusterPlan and environment; also the plan of a user's own script."""

from __future__ import annotations

import os

from launcher.config.schema import ClusterConfig, ClusterKind, Config, Device, StrategyKind, check_values
from launcher.errors import ConfigError
from launcher.plan.callback_plan import notify_entries
from launcher.plan.clusters import cluster_of, require_effect
from launcher.plan.gpus import find_gpu
from launcher.plan.host import INSTALL_COMPILER, Site, missing_for_compiling, shares_gpus
from launcher.plan.launch_plan import PLAN_FORMAT, ClusterPlan, EnvPlan, LaunchPlan, NodeRange, RunInfo, node_range
from launcher.plan.sbatch_options import gpus_asked_for, mixed_gpus, names_gpus, solve_sbatch
from launcher.quantities import count

CPU_WORKERS = 2
SCRIPT_COMMAND = ("-P", "-m", "launcher.launch.script_worker")


def solve_script(config: Config, site: Site, run: RunInfo, arguments: list[str]) -> LaunchPlan:
    """Return the plan of `launch run`: the user's torchrun script with the cluster options, without the engine.

    Args:
        arguments: of the script worker, from the user's script, -m or command on.
    """
    if arguments[0] == "-m":  # its modules are found in the user's directory first, or in a copy
        arguments = ["-m", ".", *arguments[1:]]
    cluster = solve_cluster(config.cluster, site, run.name)
    notify_entries(config.notify)  # raises for what has no known form
    return LaunchPlan(
        format=PLAN_FORMAT,
        run=run,
        cluster=cluster,
        env=solve_env(cluster, site),
        command=(*SCRIPT_COMMAND, *arguments),
        notify=tuple(config.notify),
        added=config.added_values(),
    )


def solve_cluster(
    config: ClusterConfig,
    site: Site,
    name: str,
    strategy: StrategyKind = StrategyKind.ddp,
    started: tuple[int, int] | None = None,
    nodes: int | None = None,
) -> ClusterPlan:
    """Return the hosts, ranks and devices of the job.

    Args:
        started: (hosts, ranks per host) if the user's own torchrun fixed them.
        nodes: one of the numbers that cluster.nodes allows; default: the largest.

    Raises:
        ConfigError: an impossible value, or an option of another kind of cluster.
    """
    allowed = node_range(config.nodes)
    _check_kind(config, allowed)
    device = config.device
    if config.gpu is not None:
        find_gpu(config.gpu)
        if device is Device.cpu:
            raise ConfigError("cluster.gpu", config.gpu, "has no effect with cluster.device=cpu.", "Leave one out.")
        device = Device.cuda
    if device is Device.auto:
        _require_one_kind(config, site)
        device = Device.cuda if site.gpus else Device.cpu
    if started is not None:
        allowed, nodes = NodeRange(started[0], started[0]), started[0]
    nodes = allowed.most if nodes is None else nodes
    workers = config.workers_per_node if started is None else started[1]
    slurm_job = config.kind == ClusterKind.slurm and device is Device.cuda and started is None
    asked = gpus_asked_for(config, allowed) if slurm_job else None
    if workers is None and asked is not None and strategy is not StrategyKind.single:
        workers = asked[1]
    if workers is None:
        least = CPU_WORKERS if config.gpu is not None else 1
        default = (site.gpus or least) if device is Device.cuda else CPU_WORKERS
        workers = 1 if strategy is StrategyKind.single else default
    # ranks started by the user's own torchrun, perhaps on several hosts, are checked when each selects its GPU
    most = site.partition.most_gpus if site.partition is not None and site.gpus else site.gpus
    if device is Device.cuda and workers > most and started is None and _gpus_are_known(config, site, most):
        reason = f": {site.no_gpu}" if site.no_gpu else ""
        where = f"a node of partition {site.partition.name}" if site.partition else "this machine"
        if site.shared_by > 1:
            where = f"each of {site.shared_by} cells at a time (sweep.at_once) on this machine"
        fewer = f"cluster.workers_per_node={most}, or " if most else ""
        fewer += "fewer cells at a time, or " if site.shared_by > 1 else ""
        raise ConfigError(
            "cluster.workers_per_node", workers, f"{where} has {most} usable GPUs, and each worker needs one{reason}.",
            f"Use {fewer}cluster.device=cpu.",
        )  # fmt: skip
    if asked is not None and (workers or 0) > asked[1] and not shares_gpus():
        raise ConfigError(
            "cluster.workers_per_node", workers,
            f"{asked[0]} asks for {count(asked[1], 'GPU')} a node, and each worker needs one.",
            f"Use cluster.workers_per_node={asked[1]} or less, or ask for more GPUs.",
        )  # fmt: skip
    if strategy is StrategyKind.single and (ranks := nodes * workers) > 1:
        raise ConfigError("strategy", "single", f"trains on one rank, and this job has {ranks}.", "Use strategy=ddp.")
    slurm = None
    if config.kind == ClusterKind.slurm:
        slurm = solve_sbatch(config, allowed, workers, device, site.partition, name)
    return ClusterPlan(
        kind=config.kind,
        nodes=nodes,
        min_nodes=None if allowed.fixed else allowed.least,
        rendezvous=config.rendezvous,
        interface=config.interface,
        place=None,
        workers_per_node=workers,
        device=device,
        max_restarts=config.max_restarts,
        grace_s=config.grace_s,
        cwd=site.cwd,
        import_from=(site.cwd,),
        slurm=slurm,
        gpu=config.gpu,
        price_per_gpu_hour=config.price_per_gpu_hour,
    )


def _gpus_are_known(config: ClusterConfig, site: Site, most: int) -> bool:
    """Return whether the GPU count is a hard limit: a gres may name parts of a GPU, ranks may share one, and
    a plan may be for GPUs elsewhere."""
    if (shares_gpus() and most) or config.gpu is not None or config.kind == ClusterKind.elsewhere:
        return False
    return config.kind != ClusterKind.slurm or (site.partition is not None and not names_gpus(config))


def device_notes(config: ClusterConfig, cluster: ClusterPlan, site: Site) -> list[str]:
    """Return the notes on GPUs that the job does not use, or gets of several types."""
    if cluster.device is Device.cpu:
        chosen = config.device is Device.auto and site.no_gpu
        return [f"The workers use CPUs (cluster.device=auto): {site.no_gpu}."] if chosen else []
    if cluster.slurm is None or site.partition is None or cluster.nodes == 1:
        return []
    types = mixed_gpus(config, site.partition, cluster.workers_per_node)
    if not types:
        return []
    return [
        f"Nodes of partition {site.partition.name} have different GPUs ({', '.join(types)}), and the job may get both: "
        "each step waits for the slowest. cluster.constraint or cluster.sbatch.gres=gpu:TYPE:N selects one type."
    ]


def compiler_notes(config: ClusterConfig, device: Device, compiling: str) -> list[str]:
    """Return the note that this machine cannot compile; other machines are examined by `launch doctor`.

    Args:
        device: device of the workers.
        compiling: what compiles, for the note; empty if nothing does.
    """
    here = compiling and config.kind == ClusterKind.local and config.gpu is None
    missing = missing_for_compiling(device, os.environ) if here else ""
    return [f"{compiling} builds kernels, and this machine has {missing}. {INSTALL_COMPILER}"] if missing else []


def _require_one_kind(config: ClusterConfig, site: Site) -> None:
    """Require an explicit choice if only some nodes of the partition have GPUs."""
    partition = site.partition
    if partition is None or not partition.mixed or not site.gpus or config.constraint or names_gpus(config):
        return
    raise ConfigError(
        "cluster.device", "auto", f"some nodes of partition {partition.name} have GPUs, others have none.",
        "Set cluster.device=cuda or cluster.device=cpu.",
    )  # fmt: skip


def _check_kind(config: ClusterConfig, nodes: NodeRange) -> None:
    check_values(Config(cluster=config), "cluster")
    require_effect(config)
    if config.login is not None:  # commands that run on the login node do not get here
        raise ConfigError(
            "cluster.login", config.login, "has an effect on `launch train`, `run`, `plan`, `drill` and `doctor` only.",
            "Leave it out, and submit on the login node.",
        )  # fmt: skip
    cluster_of(config.kind).check(config, nodes)


def solve_env(cluster: ClusterPlan, site: Site) -> EnvPlan:
    cores = site.cores if cluster.slurm is None else cluster.slurm.cpus_per_node
    threads = max(1, cores // cluster.workers_per_node)
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if cluster.device is Device.cpu else dict[str, str]()
    return EnvPlan(
        # torch.compile has processes on all cores for each worker otherwise
        # a task that enumerates a set of strings gets the same order on every rank and at every start
        default={
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "PYTHONHASHSEED": "0",
        },
        # unbuffered: a log line must survive the process that printed it; no shared store: each attempt has its own
        set={"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | no_gpu,
    )
