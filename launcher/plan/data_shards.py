"""Division of a stream into shards, and of the shards among ranks and loader processes.

A stream can be divided if it has a method ``shard(num_shards, index)`` and the number of its own shards as
``num_shards``, as those of Hugging Face have.

Position k of an epoch belongs to shard k mod n. Every window has a multiple of n positions, so it takes equally many
samples of each shard, whatever the number of ranks and loader processes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from launcher.errors import ConfigError
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.windows import StreamInfo
from launcher.quantities import count
from launcher.task import as_ready, is_ready

KEY = "train.data_shards"
START_AGAIN = "Return an object whose __iter__ starts from the first sample each time, such as an IterableDataset"
# limit of the automatic number: each shard has an iterator and a state of its own
MOST_SHARDS = 64
_NEAR = 2
# Operations of Hugging Face's streams after which a shard has the samples that the stream takes from the shard's files.
# Classes of earlier versions are among them. A stream with others is not divided automatically. map and filter are not
# listed, because a function that keeps a state (samples seen, a counter) gives other samples in each shard.
_KEEP_SAMPLES = {
    "ExamplesIterable", "ShuffledDataSourcesExamplesIterable", "ArrowExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable", "RebatchedArrowExamplesIterable", "SelectColumnsIterable",
    "BufferShuffledExamplesIterable", "FormattedExamplesIterable", "InterleavedShardsExamplesIterable",
    "TypedExamplesIterable",
}  # fmt: skip
_OF_THE_WHOLE = "skip() and take() count samples of the whole stream, and would leave out others in a divided one"
# operations that give other samples in a divided stream, such as held-out ones
_CHANGE_SAMPLES = {
    "SkipExamplesIterable": _OF_THE_WHOLE,
    "TakeExamplesIterable": _OF_THE_WHOLE,
    "StepExamplesIterable": "it is divided by samples already",
    "CyclingMultiSourcesExamplesIterable": "interleaved streams end with the first or the last of them",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleaved streams end with the first or the last of them",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": "its columns come from several streams",
}


def own_shards(stream: Any) -> int:
    """Return the number of shards that a stream has; 0 if it cannot be divided.

    The shards must have the samples of the stream's own ``__iter__``. Those of a stream inside a wrapper have not, nor
    have those of a base class, unless they are of the same class as the stream.
    """
    shards, classes = getattr(stream, "num_shards", None), type(stream).__mro__
    owners = [next((cls for cls in classes if name in vars(cls)), None) for name in ("shard", "__iter__")]
    if not isinstance(shards, int) or owners[0] is None or owners[1] is None:
        return 0
    known = issubclass(owners[0], owners[1]) or type(stream.shard(num_shards=shards, index=0)) is type(stream)
    return shards if known else 0


def _is_single_pass(stream: Any) -> bool:
    """Return whether a stream is an iterator whose __iter__ does not start again: a generator, ``map``, ``zip``, those
    of itertools. A class with an ``__iter__`` in Python may start again there."""
    start = inspect.getattr_static(stream, "__iter__", None)
    return isinstance(stream, Iterator) and (start is vars(Iterator)["__iter__"] or not inspect.isfunction(start))


def stream_info(stream: Any) -> StreamInfo:
    """Return what is known about the shards of a stream."""
    if is_ready(stream):
        ready = as_ready(stream)
        problem = "the training data has ready batches, which are dealt to the ranks in turn."
        return StreamInfo(
            problem=problem, single_pass=_is_single_pass(ready.batches), ready=True, batch_size=ready.size
        )
    if _is_single_pass(stream):
        return StreamInfo(problem="the training data is an iterator, which is read once.", single_pass=True)
    shards = own_shards(stream)
    if getattr(stream, "sharded", False):
        return StreamInfo(shards=shards, problem="the stream has sharded = True: each rank has samples of its own.")
    if not shards:
        lacks = (
            "the stream's class has no method shard(num_shards, index) and no attribute num_shards, which divide it."
        )
        return StreamInfo(problem=lacks)
    operations = list(_operations(getattr(stream, "_ex_iterable", None)))
    if not operations:
        return StreamInfo(shards=shards)
    if getattr(stream, "_distributed", None) is not None:
        return StreamInfo(shards=shards, problem="the stream is divided by split_dataset_by_node() already.")
    for operation in operations:
        if problem := _problem(operation):
            return StreamInfo(shards=shards, problem=f"{problem}.")
    return StreamInfo(shards=shards, automatic=all(type(each).__name__ in _KEEP_SAMPLES for each in operations))


def has_hidden_state(stream: Any) -> bool:
    """Return whether a Hugging Face stream holds samples that are not part of its state: in a shuffle buffer."""
    operations = _operations(getattr(stream, "_ex_iterable", None))
    return any(getattr(each, "buffer_size", 1) > 1 for each in operations)


def _operations(operation: Any) -> Iterator[Any]:
    """Yield a Hugging Face stream's operation and those that it reads from; none of any other stream."""
    if operation is not None:
        yield operation
        for inner in (getattr(operation, "ex_iterable", None), *getattr(operation, "ex_iterables", ())):
            yield from _operations(inner)


def _problem(operation: Any) -> str:
    """Return why a stream with this operation must not be divided."""
    if getattr(operation, "with_indices", False):
        return "with_indices counts samples from the beginning of the stream, and of each shard in a divided one"
    if getattr(operation, "drop_last_batch", False):
        return "drop_last_batch leaves out samples of each shard"
    if getattr(operation, "is_batch_accumulate_arrow_table_function", False):
        return "a function of the whole stream is applied"
    return _CHANGE_SAMPLES.get(type(operation).__name__, "")


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
        require_divisible(asked, task.stream)
    if unit % asked:
        sizes = "batch.global_size" + (" and every size of batch.ramp" if batch.ramp else "")
        divisors = [each for each in range(1, unit + 1) if unit % each == 0]
        near = [*[each for each in divisors if each < asked][-_NEAR:], *[each for each in divisors if each > asked][:1]]
        raise ConfigError(
            KEY, asked, f"must divide {sizes}, so that each window has equally many samples of each shard.",
            f"Nearest choices: {' or '.join(map(str, near))}; or other sizes.",
        )  # fmt: skip
    return asked


def require_divisible(asked: int, stream: StreamInfo) -> None:
    """Check that a stream can be divided into ``asked`` shards.

    Raises:
        ConfigError: it cannot.
    """
    if stream.problem:
        raise ConfigError(KEY, asked, stream.problem, f"Leave it out, or use {KEY}=1: every rank reads the stream.")
    if asked > stream.shards:
        have = f"the stream has {count(stream.shards, 'shard')}."
        raise ConfigError(KEY, asked, have, f"Use {KEY} of {stream.shards} or less.")


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
        return rank % self.ranks + self.ranks * process

    def shards_of(self, rank: int, process: int) -> range:
        """Return the shards of a reader."""
        return range(self.reader(rank, process), self.shards, self.readers)

    def shards_of_rank(self, rank: int) -> range:
        """Return the shards that a rank reads."""
        return range(rank % self.ranks, self.shards, self.ranks)


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
