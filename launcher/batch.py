"""The batch contract's arithmetic: which sizes fit together, and which samples of a window go into which micro-batch.

Standard library only; the plan, the workers and the tests all count with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.config import BatchConfig, Norm
from launcher.errors import ConfigError

DEFAULT_GLOBAL_SIZE = 64
DEFAULT_MICRO_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A solved global batch: ``global_size == micro_size * accumulation * world_size``. ``norm``: what a BatchNorm
    normalises by."""

    global_size: int
    micro_size: int
    accumulation: int
    world_size: int
    norm: Norm = Norm.leave


def solve_batch(config: BatchConfig, world_size: int) -> Batch:
    """Derive what the user left open from what was fixed. Nothing is rounded.

    Raises:
        ConfigError: a size below 1, sizes that contradict each other, or a division with a remainder; the message
            lists the nearest choices that work.
    """
    given = {"global_size": config.global_size, "micro_size": config.micro_size, "accumulation": config.accumulation}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"batch.{name}", value, "must be at least 1.", "Leave it out to have it derived.")
    total, micro, accumulation = config.global_size, config.micro_size, config.accumulation
    if total is None and micro is not None and accumulation is not None:
        total = micro * accumulation * world_size
    total = DEFAULT_GLOBAL_SIZE if total is None else total
    if micro is None:
        micro = _derive_micro(total, accumulation, world_size)
    if accumulation is None:
        accumulation = _divide(total, micro, world_size, "micro_size", micro)
    if micro * accumulation * world_size != total:
        raise ConfigError(
            "batch.global_size",
            total,
            f"micro_size {micro} x accumulation {accumulation} x {world_size} ranks is "
            f"{micro * accumulation * world_size}, not {total}.",
            "Leave one of the three out (=null) and it is derived from the other two.",
        )
    return Batch(
        global_size=total, micro_size=micro, accumulation=accumulation, world_size=world_size, norm=config.norm
    )


def _derive_micro(total: int, accumulation: int | None, world_size: int) -> int:
    if accumulation is not None:
        return _divide(total, accumulation, world_size, "accumulation", accumulation)
    share = _divide(total, 1, world_size, "global_size", total)
    return max(d for d in range(1, DEFAULT_MICRO_SIZE + 1) if share % d == 0)


def _divide(total: int, factor: int, world_size: int, name: str, value: int) -> int:
    quotient, rest = divmod(total, factor * world_size)
    if quotient and not rest:
        return quotient
    unit = factor * world_size
    choices = [f"batch.global_size={_or_list(_nearest_multiples(total, unit))}"]
    if name != "global_size" and total % world_size == 0:
        choices.append(f"batch.{name}={_or_list(_nearest_divisors(total // world_size, value))}")
    if total % factor == 0:
        worlds = _nearest_divisors(total // factor, world_size)
        choices.append(f"{_or_list(worlds)} ranks (cluster.workers_per_node)")
    given = f"batch.global_size={total}"
    if name != "global_size":
        given += f" batch.{name}={value}"
    units = f" in units of {factor}" if factor > 1 else ""
    raise ConfigError(
        given,
        None,
        f"{total} samples cannot be shared by {world_size} ranks{units}.",
        f"Nearest choices: {'; or '.join(choices)}.",
    )


def _or_list(values: Iterable[int]) -> str:
    return " or ".join(str(v) for v in values)


def _nearest_multiples(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [m for m in (below, below + unit) if m > 0]


def _nearest_divisors(value: int, target: int) -> list[int]:
    """The divisors of ``value`` next below and above ``target``, without itself."""
    low = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted({*low, *(value // d for d in low)} - {target})
    return [*[d for d in divisors if d < target][-1:], *[d for d in divisors if d > target][:1]]


def count_windows(samples: int, global_size: int, *, keep_short: bool) -> tuple[int, int]:
    """``(windows in an epoch, samples of its short last window)``; 0 samples: the last one is full, or dropped."""
    full, rest = divmod(samples, global_size)
    return (full + 1, rest) if rest and keep_short else (full, 0)


def share_of_window(samples: int, batch: Batch, rank: int) -> list[range]:
    """The micro-batches of ``rank`` in a window of ``samples``, as ranges of offsets into the window.

    Every rank gets the same number of micro-batches, as few as can hold the window, and they differ by one sample at
    most; an empty range is a micro-batch of weight zero, which a rank still runs because the others wait for it.
    In a full window the n-th micro-batches of all ranks lie side by side.
    """
    count = -(-samples // (batch.micro_size * batch.world_size))
    base, extra = divmod(samples, count * batch.world_size)
    shares: list[range] = []
    for n in range(count):
        slot = n * batch.world_size + rank
        start = slot * base + min(slot, extra)
        shares.append(range(start, start + base + (slot < extra)))
    return shares
