"""Division of a stream into shards, and of the shards among ranks and loader processes.

Position k of an epoch belongs to shard k mod n. Every window has a multiple of n positions, so it takes equally many
samples of each shard, whatever the number of ranks and loader processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from launcher.errors import ConfigError
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.windows import StreamInfo
from launcher.quantities import count

KEY = "train.data_shards"
START_AGAIN = "Return an object whose __iter__ starts from the first sample each time, such as an IterableDataset"
# limit of the automatic number: each shard has an iterator and a state of its own
MOST_SHARDS = 64
_NEAR = 2


def solve_data_shards(asked: int | None, batch: Batch, task: TaskPlan) -> int:
    """Return ``train.data_shards``, solved; 1 if the data is not divided.

    Raises:
        ConfigError: the data cannot be divided into so many shards.
    """
    if asked == 1 or (asked is None and (task.stream is None or not task.stream.automatic)):
        return 1
    unit = math.gcd(*batch.sizes)
    if asked is None:
        assert task.stream is not None
        unit = math.gcd(unit, task.stream.shards)
        return max(each for each in range(1, MOST_SHARDS + 1) if unit % each == 0)
    if task.samples is not None:
        raise ConfigError(KEY, asked, "divides streams only, and the training data has a length.", "Leave it out.")
    if task.stream is not None:
        require_divisible(asked, task.stream.shards, task.stream.problem)
    if unit % asked:
        sizes = "batch.global_size" + (" and every size of batch.ramp" if batch.ramp else "")
        divisors = [each for each in range(1, unit + 1) if unit % each == 0]
        near = [*[each for each in divisors if each < asked][-_NEAR:], *[each for each in divisors if each > asked][:1]]
        raise ConfigError(
            KEY, asked, f"must divide {sizes}, so that each window has equally many samples of each shard.",
            f"Nearest choices: {' or '.join(map(str, near))}; or other sizes.",
        )  # fmt: skip
    return asked


def require_divisible(asked: int, shards: int, problem: str) -> None:
    """Check that a stream can be divided into ``asked`` shards.

    Args:
        shards: the stream's own number; 0 if it has none.
        problem: reason why it must not be divided.

    Raises:
        ConfigError: it cannot.
    """
    if problem:
        raise ConfigError(KEY, asked, problem, f"Leave it out, or use {KEY}=1: every rank reads the stream.")
    if asked > shards:
        raise ConfigError(KEY, asked, f"the stream has {count(shards, 'shard')}.", f"Use {KEY} of {shards} or less.")


def require_second_epoch(epochs: int | None, stream: StreamInfo | None) -> None:
    """Check that a stream can be read ``epochs`` times; None: their number is not known.

    Raises:
        ConfigError: it is an iterator, and there are several epochs.
    """
    if stream is not None and stream.single_pass and epochs is not None and epochs > 1:
        raise ConfigError(
            "train.epochs", epochs, "the training data is an iterator or a generator, which can be read only once.",
            f"{START_AGAIN}, or use train.epochs=1.",
        )  # fmt: skip


@dataclass(frozen=True)
class Division:
    """Division of a stream's shards among readers: ranks, or loader processes of ranks.

    Reader q of R takes positions q, q + R, ... of every window, which are those of the shards q, q + R, ...

    Attributes:
        shards: number of shards; 1: the stream is not divided.
        ranks: ranks that the shards are divided among; 1: every rank reads all shards, and uses its part.
        processes: readers of each rank.
    """

    shards: int = 1
    ranks: int = 1
    processes: int = 1

    @classmethod
    def of(cls, plan: RunPlan) -> Self:
        """Return the division of a job. Loader processes make whole micro-batches, in turn, of shards of their own."""
        shards, batch = plan.train.data_shards, plan.batch
        if shards % batch.world_size:
            return cls(shards)
        firsts = [sum(stage.windows for stage in batch.ramp[:number]) for number in range(len(batch.ramp) + 1)]
        unit = math.gcd(shards // batch.world_size, *map(batch.accumulation_at, firsts))
        processes = max(each for each in range(1, max(1, plan.train.loader_workers) + 1) if unit % each == 0)
        return cls(shards, batch.world_size, processes)

    @property
    def readers(self) -> int:
        return self.ranks * self.processes

    def reader(self, rank: int, process: int) -> int:
        """Return the number of a reader."""
        return rank + self.ranks * process if self.ranks > 1 else process

    def shards_of(self, rank: int, process: int) -> range:
        """Return the shards of a reader."""
        return range(self.reader(rank, process), self.shards, self.readers)

    def shards_of_rank(self, rank: int) -> range:
        """Return the shards that a rank reads."""
        return range(rank if self.ranks > 1 else 0, self.shards, self.ranks)


def data_shards_text(plan: RunPlan) -> str:
    """Return how the ranks share the reading of a stream, and what would let each read a part of it."""
    shards, ranks = plan.train.data_shards, plan.batch.world_size
    if plan.task.stream is not None and plan.task.stream.ready:
        samples = "" if plan.task.samples is None else f" of {plan.task.samples:,} samples"
        return f"ready batches{samples}, {'' if ranks == 1 else 'dealt to the ranks in turn, '}in their loader's order"
    if shards == 1:
        several = plan.task.stream is not None and plan.task.stream.shards > 1 and not plan.task.stream.problem
        remedy = f" ({KEY} divides it)" if several and ranks > 1 else ""
        return "a stream" + (f" that every rank reads{remedy}" if ranks > 1 and plan.task.stream is not None else "")
    text = f"a stream of {shards} shards"
    if ranks == 1:
        return text
    if shards % ranks == 0:
        return f"{text}, each rank reads its own"
    multiple = f"{KEY} a multiple of {ranks}"
    return f"{text}; every rank reads all, because {ranks} ranks do not divide them (use {multiple})"
