"""Outer steps: which ranks are a site, and what a site may do without the others.

Between two outer steps a site trains on its own. All sites take the same number of optimizer steps, so whatever lets
one of them skip or end earlier than the others is refused here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.config.choices import OuterKind
from launcher.config.schema import Config, OnNonfinite, OuterConfig, PrecisionKind, StrategyConfig, StrategyKind
from launcher.errors import ConfigError
from launcher.plan.batch import Batch
from launcher.plan.launch_plan import ClusterPlan, node_range
from launcher.plan.windows import ANY_NUMBER
from launcher.quantities import bytes_text, count

# bytes that are sent of each parameter, in fp32
SENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class OuterPlan(OuterConfig):
    """Outer steps of a job.

    Attributes:
        sites: number of sites, at least 2.
        site_size: ranks of a site; their numbers are adjacent.
    """

    mixing: float = 0.0
    sites: int = 1
    site_size: int

    def fragments_after(self, step: int) -> list[int]:
        """Return the fragments that are sent after a step, in turn within each round of ``every`` steps: the last one
        after all of them."""
        offsets = [self.every * (number + 1) // self.fragments % self.every for number in range(self.fragments)]
        return [fragment for fragment, offset in enumerate(offsets) if step % self.every == offset]

    def wire_bytes(self, parameters: int) -> float:
        """Return the bytes that a site sends per optimizer step, on average, to average ``parameters`` parameters."""
        return (self.sites - 1) * SENT_BYTES * parameters / self.every


def solve_outer(config: Config, batch: Batch, cluster: ClusterPlan) -> OuterPlan | None:
    """Return the outer steps of a job; None without any.

    Raises:
        ConfigError: the ranks or the batch cannot be divided into sites, or a value contradicts another one.
    """
    outer = config.outer
    if outer.kind is OuterKind.none:
        return None
    if not node_range(config.cluster.nodes).fixed:
        raise ConfigError(
            "cluster.nodes", config.cluster.nodes, "cannot be a range with outer=diloco: the number of sites is fixed "
            "while a job runs.", "Name one number; `launch resume RUN cluster.nodes=N` changes it.",
        )  # fmt: skip
    size = _site_size(outer, batch, cluster, config.strategy)
    sites = batch.world_size // size
    _require_times(outer, config.schedule.warmup_steps)
    if not batch.even or any(each % sites for each in batch.sizes):
        raise ConfigError(
            "batch.uneven", "true", f"outer=diloco needs equal shares for its {sites} sites.",
            "Choose a batch.global_size that the ranks share equally.",
        )  # fmt: skip
    mixing = outer.mixing if outer.mixing is not None else 0.5 if outer.delay else 0.0
    values: dict[str, Any] = vars(outer) | {"mixing": mixing, "sites": sites}
    return OuterPlan(**values, site_size=size)


def _site_size(outer: OuterConfig, batch: Batch, cluster: ClusterPlan, strategy: StrategyConfig) -> int:
    world, group = batch.world_size, outer.group
    divisors = [size for size in range(1, world) if world % size == 0]
    if group == "shard":
        if strategy.kind is not StrategyKind.hsdp:
            raise ConfigError(
                "outer.group", group, f"strategy={strategy.kind.value} has no shard groups.",
                "Use strategy=hsdp, or outer.group=node, or a number of ranks.",
            )  # fmt: skip
        size = cluster.workers_per_node if strategy.shard_size is None else strategy.shard_size
    elif group == "node":
        size = cluster.workers_per_node
    elif str(group).isdecimal() and int(group) > 0:
        size = int(group)
    else:
        raise ConfigError("outer.group", group, "must be node, shard, or a number of ranks.")
    if size not in divisors:
        shown = group if str(group) == str(size) else f"{group} ({count(size, 'rank')})"
        ways = f"Use outer.group={' or '.join(map(str, divisors))}." if divisors else "Add workers or hosts."
        raise ConfigError("outer.group", shown, f"does not divide {count(world, 'rank')} into several sites.", ways)
    return size


def _require_times(outer: OuterConfig, warmup_steps: int) -> None:
    """Check that the parts of a round fit into it."""
    every = outer.every
    for name, value, most in (("fragments", outer.fragments, every), ("delay", outer.delay, every - 1)):
        if value > most:
            raise ConfigError(f"outer.{name}", value, f"must be at most {most} with outer.every={every}.")
    if every < warmup_steps:
        raise ConfigError(
            "outer.every", every, f"is below schedule.warmup_steps={warmup_steps}: the first averages would be of "
            "steps that are still small.", f"Use outer.every={warmup_steps} or more, or a shorter warm-up.",
        )  # fmt: skip


def strategy_of_site(config: StrategyConfig, outer: OuterPlan) -> StrategyConfig:
    """Return the strategy with which the ranks of one site compute."""
    if outer.group == "shard":
        return replace(config, kind=StrategyKind.fsdp, shard_size=None)
    return config


def require_in_step(config: Config, samples: int | None, short_window: int) -> None:
    """Check that no site can skip a window, or end before the others.

    Args:
        samples: in an epoch; None for a stream.
        short_window: samples in an epoch's last window, 0 if it is full.

    Raises:
        ConfigError: a value would allow it.
    """
    skips = "lets a site skip a step that others take, which outer=diloco does not allow."
    if samples is None:
        raise ConfigError(
            "outer", "diloco", "does not work with a stream: sites would reach its end at different steps.",
            "Return map-style data (__len__ and __getitem__).",
        )  # fmt: skip
    if short_window and samples != ANY_NUMBER:
        raise ConfigError(
            "batch.short_window", config.batch.short_window, f"an epoch ends with {short_window} samples, which "
            "the sites cannot share equally.", "Use batch.short_window=drop.",
        )  # fmt: skip
    if config.precision.kind is PrecisionKind.fp16:
        raise ConfigError("precision", "fp16", skips, "Use precision=bf16 or fp32.")
    if config.train.on_nonfinite is OnNonfinite.skip:
        raise ConfigError("train.on_nonfinite", "skip", skips, "Use train.on_nonfinite=stop.")
    for key, value in (("train.patience", config.train.patience), ("checkpoint.best", config.checkpoint.best)):
        if value is not None:
            raise ConfigError(
                key, value, "does not work with outer=diloco: sites have other held-out losses.", "Leave it out."
            )


def outer_text(outer: OuterPlan, batch: Batch) -> str:
    """Return a text such as "2 sites of 4 ranks with 32 samples each, averaged every 50 steps"."""
    share = batch.of_site(outer.sites).global_size
    parts = [f"{outer.sites} sites of {count(outer.site_size, 'rank')}, {count(share, 'sample')} each a step; averaged"]
    parts.append(f"every {count(outer.every, 'step')}")
    if outer.fragments > 1:
        parts.append(f"in {outer.fragments} parts in turn")
    if outer.delay:
        parts.append(f"which arrive {count(outer.delay, 'step')} later")
    parts.append(f"outer lr {outer.lr:g}, momentum {outer.momentum:g}")
    return f"{parts[0]} {', '.join(parts[1:])}"


def outer_notes(outer: OuterPlan | None, parameters: int | None) -> list[str]:
    """Return what the user should know: which contract holds, and what is sent of ``parameters`` trained parameters."""
    if outer is None:
        return []
    notes = [
        f"outer=diloco is not the gradient of one global batch: each site takes {count(outer.every, 'step')} on its "
        "own share before the sites average. `launch report SYNCHRONOUS OUTER` compares it with a synchronous job."
    ]
    if parameters is not None:
        synchronous = 8 * (outer.sites - 1) / outer.sites * parameters
        own = outer.wire_bytes(parameters)
        notes.append(
            f"A site sends {bytes_text(round(own))} a step to the others on average; with every step synchronised in "
            f"fp32 it would be {bytes_text(round(synchronous))}."
        )
    return notes
