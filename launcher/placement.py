"""Where a job runs: ClusterConfig and this machine -> ClusterPlan, its environment, and the plan of a bare script."""

from __future__ import annotations

from launcher.config import ClusterConfig, ClusterKind, Device, StrategyKind
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
    config: ClusterConfig, site: Site, strategy: StrategyKind = StrategyKind.ddp, started: tuple[int, int] | None = None
) -> ClusterPlan:
    _check_kind(config)
    device = config.device
    if device is Device.auto:
        device = Device.cuda if site.gpus else Device.cpu
    nodes, workers = started or (config.nodes, config.workers_per_node)
    if workers is None:
        default = (site.gpus or 1) if device is Device.cuda else CPU_WORKERS
        workers = 1 if strategy is StrategyKind.single else default
    if workers < 1:
        raise ConfigError("cluster.workers_per_node", workers, "must be at least 1.")
    # ranks that a user's own torchrun has started, perhaps on several hosts, are checked where each takes its GPU
    if device is Device.cuda and workers > site.gpus and started is None:
        raise ConfigError(
            "cluster.workers_per_node",
            workers,
            f"this machine shows {site.gpus} GPUs and each worker needs one.",
            f"Use {'cluster.workers_per_node=' + str(site.gpus) + ', or ' if site.gpus else ''}cluster.device=cpu.",
        )
    if strategy is StrategyKind.single and (ranks := nodes * workers) > 1:
        raise ConfigError(
            "strategy", "single", f"one rank trains alone, and {ranks} were asked for.", "Use strategy=ddp."
        )
    return ClusterPlan(
        kind=config.kind,
        nodes=nodes,
        rendezvous=config.rendezvous,
        interface=config.interface,
        link_gbit=config.link_gbit,
        place=None,
        workers_per_node=workers,
        device=device,
        max_restarts=config.max_restarts,
        grace_s=config.grace_s,
        cwd=site.cwd,
    )


def _check_kind(config: ClusterConfig) -> None:
    if config.kind is ClusterKind.local:
        for name in ("rendezvous", "interface", "link_gbit"):
            if (value := getattr(config, name)) is not None:
                raise ConfigError(
                    f"cluster.{name}", value, "has no effect with cluster=local.", "For several hosts: cluster=hosts."
                )
        if config.nodes != 1:
            raise ConfigError(
                "cluster.nodes", config.nodes, "cluster=local is one machine.",
                "Use cluster.nodes=1; for several: cluster=hosts.",
            )  # fmt: skip
        return
    if config.nodes < 2:
        raise ConfigError(
            "cluster.nodes", config.nodes, "cluster=hosts is a job over several machines.",
            "Use cluster.nodes=2 or more, or cluster=local.",
        )  # fmt: skip
    if config.rendezvous is None:
        raise ConfigError(
            "cluster.rendezvous", None, "cluster=hosts needs it: where the hosts meet.",
            "Set cluster.rendezvous=HOST:PORT, an address of the first host and a free port, the same on every host.",
        )  # fmt: skip
    endpoint(config.rendezvous)


def endpoint(rendezvous: str) -> tuple[str, int]:
    """``"HOST:PORT"`` as its two parts. Raises ConfigError for what has not this form."""
    host, colon, port = rendezvous.rpartition(":")
    if ":" in host:
        raise ConfigError(
            "cluster.rendezvous", rendezvous, "IPv6 addresses are not supported.",
            "Use the first host's name, or its IPv4 address: HOST:PORT.",
        )  # fmt: skip
    if not colon or not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(
            "cluster.rendezvous", rendezvous, "must be HOST:PORT, the port between 1 and 65535.",
            "Such as cluster.rendezvous=10.0.0.1:29400.",
        )  # fmt: skip
    return host, int(port)


def solve_env(config: ClusterConfig, cluster: ClusterPlan, site: Site) -> EnvPlan:
    threads = max(1, site.cores // cluster.workers_per_node)
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if cluster.device is Device.cpu else dict[str, str]()
    return EnvPlan(
        allow=(*ALLOWED_ENV, *config.env),
        default={"OMP_NUM_THREADS": str(threads)},
        # unbuffered: a log line must not be lost with the process that printed it; a store of its own for each attempt
        set={"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | no_gpu,
    )
