"""Outer steps in the plan: which ranks are a site, and what a site may do without the others.

Between two outer steps a site trains on its own. All sites take the same number of optimizer steps, so whatever lets
one of them skip or end earlier than the others is refused here. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.config.schema import OnNonfinite, PrecisionKind, StrategyKind
from launcher.errors import ConfigError
from launcher.extensions.outer.outer_keys import OuterConfig
from launcher.plan.division import DividedJob, UndividedJob
from launcher.plan.launch_plan import SitesPlan, node_range
from launcher.plan.windows import ANY_NUMBER
from launcher.quantities import bytes_text, count

# bytes that are sent of each parameter, in fp32
SENT_BYTES = 4


def divided(outer: OuterConfig, job: UndividedJob) -> DividedJob:
    """Return the sites of a job.

    Raises:
        ConfigError: the ranks or the batch cannot be divided into sites, a value contradicts another one, or would let
            a site skip a window or end before the others.
    """
    nodes, batch = job.config.cluster.nodes, job.batch
    if not node_range(nodes).fixed:
        raise ConfigError(
            "cluster.nodes", nodes, "cannot be a range with outer=diloco: the number of sites is fixed while a job "
            "runs.", "Name one number; `launch resume RUN cluster.nodes=N` changes it.",
        )  # fmt: skip
    size = _site_size(outer, job)
    sites = batch.world_size // size
    _require_times(outer, job.config.schedule.warmup_steps)
    if not batch.even or any(each % sites for each in batch.sizes):
        raise ConfigError(
            "batch.uneven", "true", f"outer=diloco needs equal shares for its {sites} sites.",
            "Choose a batch.global_size that the ranks share equally.",
        )  # fmt: skip
    _require_in_step(job)
    strategy = job.config.strategy
    if outer.group == "shard":
        strategy = replace(strategy, kind=StrategyKind.fsdp, shard_size=None)
    plan = SitesPlan(
        key="outer", value=outer.kind.value, count=sites, text=_text(outer, sites, size, batch.global_size // sites),
        connect="launcher.extensions.outer.outer_steps:connected_sites",
    )  # fmt: skip
    return DividedJob(plan, strategy, _notes(outer, sites, job.parameters))


def _site_size(outer: OuterConfig, job: UndividedJob) -> int:
    strategy, world, group = job.config.strategy, job.batch.world_size, outer.group
    if group == "shard" and strategy.kind is not StrategyKind.hsdp:
        raise ConfigError(
            "outer.group", group, f"strategy={strategy.kind.value} has no shard groups.",
            "Use strategy=hsdp, or outer.group=node, or a number of ranks.",
        )  # fmt: skip
    if group in ("node", "shard"):
        size = (strategy.shard_size if group == "shard" else None) or job.cluster.workers_per_node
    elif str(group).isdecimal() and int(group) > 0:
        size = int(group)
    else:
        raise ConfigError("outer.group", group, "must be node, shard, or a number of ranks.")
    divisors = [size for size in range(1, world) if world % size == 0]
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


def _require_in_step(job: UndividedJob) -> None:
    """Check that no site can skip a window, or end before the others."""
    config, skips = job.config, "lets a site skip a step that others take, which outer=diloco does not allow."
    if job.samples is None:
        raise ConfigError(
            "outer", "diloco", "does not work with a stream: sites would reach its end at different steps.",
            "Return map-style data (__len__ and __getitem__).",
        )  # fmt: skip
    if job.short_window and job.samples != ANY_NUMBER:
        raise ConfigError(
            "batch.short_window", config.batch.short_window, f"an epoch ends with {job.short_window} samples, which "
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


def _text(outer: OuterConfig, sites: int, size: int, share: int) -> str:
    """Return a text such as "2 sites of 4 ranks, 32 samples each a step; averaged every 50 steps"."""
    parts = [f"{sites} sites of {count(size, 'rank')}, {count(share, 'sample')} each a step; averaged"]
    parts.append(f"every {count(outer.every, 'step')}")
    if outer.fragments > 1:
        parts.append(f"in {outer.fragments} parts in turn")
    if outer.delay:
        parts.append(f"which arrive {count(outer.delay, 'step')} later")
    parts.append(f"outer lr {outer.lr:g}, momentum {outer.momentum:g}")
    return f"{parts[0]} {', '.join(parts[1:])}"


def _notes(outer: OuterConfig, sites: int, parameters: int | None) -> list[str]:
    """Return which contract holds, and what is sent of the trained parameters."""
    notes = [
        f"outer=diloco is not the gradient of one global batch: each site takes {count(outer.every, 'step')} on its "
        "own share before the sites average. `launch report SYNCHRONOUS OUTER` compares it with a synchronous job."
    ]
    if parameters is not None:
        own = (sites - 1) * SENT_BYTES * parameters / outer.every
        synchronous = 2 * SENT_BYTES * (sites - 1) / sites * parameters
        notes.append(
            f"A site sends {bytes_text(round(own))} a step to the others on average; with every step synchronised in "
            f"fp32 it would be {bytes_text(round(synchronous))}."
        )
    return notes
