"""Shards of a stream: whether a division keeps its samples, and the shards themselves.

A stream can be divided if it has a method ``shard(num_shards, index)`` and the number of its own shards as
``num_shards``, as those of Hugging Face have.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from launcher.errors import DataError
from launcher.plan.data_shards import require_divisible
from launcher.plan.windows import StreamInfo
from launcher.task import as_ready, is_ready

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
    if not isinstance(stream, Iterator):
        return False
    start = type(stream).__iter__
    return start is Iterator.__iter__ or not inspect.isfunction(start)


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


def shard_of(stream: Any, shards: int, index: int) -> Any:
    """Return shard ``index`` of ``shards``, which shares no state with the stream and its other shards.

    Raises:
        DataError: it cannot be copied.
    """
    shard = stream.shard(num_shards=shards, index=index)
    try:
        return copy.deepcopy(shard)  # a shard may be a shallow copy, whose generator is that of all shards
    except Exception as error:
        raise DataError(
            f"A shard of the stream cannot be copied: {type(error).__name__}: {error}\n"
            "  Open files in __iter__; or use train.data_shards=1."
        ) from error


def require_shards(stream: Any, shards: int) -> None:
    """Check that the training data can be divided into ``shards``; for loops of the user's own, whose data is not known
    when they are planned.

    Raises:
        ConfigError: it cannot.
    """
    if shards > 1:
        require_divisible(shards, own_shards(stream), stream_info(stream).problem)
