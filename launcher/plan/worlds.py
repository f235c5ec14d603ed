"""World sizes of a job whose number of hosts is a range, and the batch in each of them. Pure.

The job is planned for the most hosts. On fewer, the global batch and micro-batch stay the same, so that neither
training nor a rank's memory changes; accumulation follows.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from launcher.config.schema import BatchConfig, Norm
from launcher.errors import ConfigError, UserError
from launcher.plan.batch import Batch, solve_batch


class NodeRange(NamedTuple):
    """Allowed numbers of hosts; both ends are equal if the number is fixed."""

    least: int
    most: int

    @property
    def fixed(self) -> bool:
        return self.least == self.most

    @property
    def text(self) -> str:
        return str(self.most) if self.fixed else f"{self.least} to {self.most}"


def node_range(nodes: int | str) -> NodeRange:
    """Parse ``cluster.nodes``: a number, or ``"MIN:MAX"``.

    Raises:
        ConfigError: neither form, below 1, or MIN above MAX.
    """
    match = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", str(nodes))
    if match is None:
        raise ConfigError(
            "cluster.nodes", nodes, "is not a number of hosts.", "Write a number, or MIN:MAX such as cluster.nodes=2:4."
        )
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ConfigError("cluster.nodes", nodes, "must be at least 1.")
    if least > most:
        raise ConfigError(
            "cluster.nodes", nodes, f"the minimum {least} is above the maximum {most}.",
            f"Write cluster.nodes={most}:{least}.",
        )  # fmt: skip
    return NodeRange(least, most)


def solve_largest(config: BatchConfig, world_size: int) -> Batch:
    """Return the batch on the most hosts. A range of hosts permits unequal shares where needed, without ``uneven``."""
    try:
        return solve_batch(config, world_size)
    except ConfigError as error:
        if config.uneven:
            raise
        try:
            return solve_batch(dataclasses.replace(config, uneven=True), world_size)
        except ConfigError:
            raise error from None


def solve_smaller(config: BatchConfig, largest: Batch, world_size: int) -> Batch:
    """Return the same global batch in micro-batches of the same size, on fewer ranks."""
    same = dataclasses.replace(
        config,
        global_size=largest.global_size,
        micro_size=largest.micro_size,
        accumulation=None,
        on_oom=largest.on_oom,  # set by batch.micro_size=auto
    )
    return solve_largest(same, world_size)


def on_hosts(count: int, nodes: int | str, error: UserError) -> ConfigError:
    """Return ``error``, which occurs on ``count`` hosts, as an error about the range."""
    problem, _, remedy = str(error).partition("\n  ")
    hosts = f"{count} host{'' if count == 1 else 's'}"
    remedy = f"{remedy} Or start the range above {count}.".strip()
    return ConfigError("cluster.nodes", nodes, f"not possible on {hosts}: {problem}", remedy)


def notes(config: BatchConfig, batches: dict[int, Batch], batch_norms: int | None) -> tuple[str, ...]:
    """Return what the user should know about the world sizes.

    Args:
        batches: by number of hosts.
        batch_norms: number of the model's BatchNorm layers.
    """
    lines: list[str] = []
    most = max(batches)
    uneven = [n for n, batch in sorted(batches.items()) if not batch.even]
    if uneven and not config.uneven:
        lines.append(
            f"On {_listed(uneven)} host{'' if uneven == [1] else 's'} the ranks take unequal shares of a window, with "
            "the same gradient (as with batch.uneven=true)."
        )
    if config.accumulation is not None:
        lines.append(f"batch.accumulation={config.accumulation} applies to {most} hosts; on fewer it is higher.")
    if batch_norms and (config.norm is Norm.sync or (config.norm is Norm.leave and uneven)):
        lines.append(
            "What a BatchNorm normalises by depends on the number of hosts; with batch.norm=window or freeze it does "
            "not."
        )
    return tuple(lines)


def _listed(numbers: list[int]) -> str:
    """Return ``2``, ``2 or 3``, ``2, 3 or 5``."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
