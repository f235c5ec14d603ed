"""Bounds of single values. Checks that involve several values or the machine belong to the solvers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from launcher.config.schema import Compress, Config, OnNonfinite
from launcher.errors import ConfigError
from launcher.plan.launch_plan import node_range
from launcher.plan.optimizer_plan import valid_betas

Number = float | int


def _at_least(low: Number) -> tuple[Callable[[Number], bool], str]:
    return lambda v: math.isfinite(v) and v >= low, f"must be at least {low}."


def _above(low: Number) -> tuple[Callable[[Number], bool], str]:
    return lambda v: math.isfinite(v) and v > low, f"must be above {low}."


def _between(low: Number, high: Number) -> tuple[Callable[[Number], bool], str]:
    return lambda v: low <= v <= high, f"must be between {low} and {high}."


_BOUNDS: dict[str, tuple[Callable[[Number], bool], str]] = {
    "cluster.workers_per_node": _at_least(1),
    "cluster.price_per_gpu_hour": _at_least(0),
    "cluster.max_restarts": _at_least(0),
    "cluster.grace_s": _at_least(1),
    "cluster.cpus_per_worker": _at_least(1),
    "strategy.bucket_mb": _above(0),
    "strategy.powersgd_rank": _at_least(1),
    "strategy.powersgd_start": _at_least(2),  # PowerSGD's warm start needs two full synchronisations (torch)
    "strategy.shard_size": _at_least(1),
    "precision.init_scale": _above(0),
    "precision.growth_interval": _at_least(1),
    "optimizer.lr": _above(0),
    "optimizer.weight_decay": _at_least(0),
    "optimizer.eps": _above(0),
    "optimizer.momentum": _between(0, 1),
    "optimizer.reference_batch": _at_least(1),
    "schedule.warmup_steps": _at_least(0),
    "schedule.min_ratio": _between(0, 1),
    "outer.every": _at_least(1),
    "outer.lr": _above(0),
    "outer.momentum": _between(0, 1),
    "outer.fragments": _at_least(1),
    "outer.delay": _at_least(0),
    "outer.mixing": _between(0, 1),
    "train.steps": _at_least(1),
    "train.epochs": _at_least(1),
    "train.clip_norm": _above(0),
    "train.seed": _between(0, 2**63 - 1),
    "train.log_every": _at_least(1),
    "train.eval_every": _at_least(0),
    "train.eval_micro_size": _at_least(1),
    "train.patience": _at_least(1),
    "train.eval_samples": _at_least(1),
    "train.loader_workers": _at_least(0),
    "train.data_shards": _at_least(1),
    "train.hang_timeout": _above(0),
    "train.straggler_share": _between(0, 1),
    "checkpoint.every": _at_least(1),
    "checkpoint.every_minutes": _above(0),
    "checkpoint.keep": _at_least(1),
    "run.calibrate_s": _at_least(0),
    "sweep.at_once": _at_least(1),
}


def check(config: Config) -> None:
    """Check all bounds and mutually exclusive values.

    Raises:
        ConfigError: for the first violation.
    """
    for key, (holds, problem) in _BOUNDS.items():
        group, name = key.split(".")
        value = getattr(getattr(config, group), name)
        if value is not None and not holds(value):
            raise ConfigError(key, value, problem)
    node_range(config.cluster.nodes)
    betas = config.optimizer.betas
    if betas is not None and not valid_betas(betas):
        raise ConfigError("optimizer.betas", betas, "must be two numbers of at least 0 and below 1.")
    if config.optimizer.nesterov and not config.optimizer.momentum:
        raise ConfigError("optimizer.nesterov", "true", "needs optimizer.momentum above 0.")
    if config.train.steps is not None and config.train.epochs is not None:
        raise ConfigError(
            "train.epochs", config.train.epochs, f"train.steps={config.train.steps} is set too.", "Leave one out."
        )
    if config.train.on_nonfinite is OnNonfinite.skip and config.strategy.compress is Compress.powersgd:
        raise ConfigError(
            "train.on_nonfinite", "skip", "does not work with strategy.compress=powersgd, which adds what it did not "
            "send to the next gradient: one nan would spoil all later steps.",
            "Use another strategy.compress, or train.on_nonfinite=stop.",
        )  # fmt: skip
    hang_timeout, grace_s = config.train.hang_timeout, config.cluster.grace_s
    if hang_timeout is not None and hang_timeout <= grace_s:
        raise ConfigError(
            "train.hang_timeout", hang_timeout,
            f"must be above cluster.grace_s={grace_s}, the seconds in which workers must stop.",
            "Raise it or lower cluster.grace_s; train.hang_timeout=null disables the check.",
        )  # fmt: skip
    for key, name in (("run.name", config.run.name), ("sweep.name", config.sweep.name)):
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,127}", name):
            raise ConfigError(
                key, name, "must be letters, digits and _ . = , + - only, starting with a letter or digit."
            )
