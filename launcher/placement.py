"""Where a job runs: ClusterConfig and this machine -> ClusterPlan, its environment, and the plan of a bare script."""

from __future__ import annotations

from launcher.config import ClusterConfig, Device, StrategyKind
from launcher.errors import ConfigError
from launcher.plan import FORMAT, ClusterPlan, EnvPlan, LaunchPlan, RunInfo
from launcher.site import ALLOWED_ENV, Site

CPU_WORKERS = 2


def solve_script(config: ClusterConfig, site: Site, run: RunInfo, arguments: list[str]) -> LaunchPlan:
    """The plan of `launch run`: a torchrun script of the user's on the same cluster options, without the engine."""
    cluster = solve_cluster(config, site)
    return LaunchPlan(
        format=FORMAT,
        run=run,
        cluster=cluster,
        env=solve_env(config, cluster, site),
        command=("-P", "-m", "launcher.cluster.script", *arguments),
    )


def solve_cluster(
    config: ClusterConfig, site: Site, strategy: StrategyKind = StrategyKind.ddp, world_size: int | None = None
) -> ClusterPlan:
    if config.nodes != 1:
        raise ConfigError("cluster.nodes", config.nodes, "cluster=local is one machine.", "Use cluster.nodes=1.")
    device = config.device
    if device is Device.auto:
        device = Device.cuda if site.gpus else Device.cpu
    workers = world_size if world_size is not None else config.workers_per_node
    if workers is None:
        default = (site.gpus or 1) if device is Device.cuda else CPU_WORKERS
        workers = 1 if strategy is StrategyKind.single else default
    if workers < 1:
        raise ConfigError("cluster.workers_per_node", workers, "must be at least 1.")
    if device is Device.cuda and workers > site.gpus:
        raise ConfigError(
            "cluster.workers_per_node",
            workers,
            f"this machine shows {site.gpus} GPUs and each worker needs one.",
            f"Use {'cluster.workers_per_node=' + str(site.gpus) + ', or ' if site.gpus else ''}cluster.device=cpu.",
        )
    if strategy is StrategyKind.single and workers > 1:
        raise ConfigError(
            "strategy", "single", f"one rank trains alone, and {workers} were asked for.", "Use strategy=ddp."
        )
    return ClusterPlan(
        kind=config.kind,
        nodes=config.nodes,
        workers_per_node=workers,
        device=device,
        max_restarts=config.max_restarts,
        grace_s=config.grace_s,
        cwd=site.cwd,
    )


def solve_env(config: ClusterConfig, cluster: ClusterPlan, site: Site) -> EnvPlan:
    threads = max(1, site.cores // cluster.workers_per_node)
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if cluster.device is Device.cpu else dict[str, str]()
    return EnvPlan(
        allow=(*ALLOWED_ENV, *config.env),
        default={"OMP_NUM_THREADS": str(threads)},
        # unbuffered: a log line must not be lost with the process that printed it; a store of its own for each attempt
        set={"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | no_gpu,
    )
