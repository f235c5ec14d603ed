"""State of a stream in checkpoints, so that a resume does not read again what was read before.

A stream has a state if it, or the iterator that it returns, has the methods ``state_dict`` and ``load_state_dict``, as
those of Hugging Face and torchdata have. The stream is read ahead of the step, in a loader process, so its state is
taken before each window is read, and sent with it. Outlines of the samples that follow are saved with the state: a
state that does not lead to them (of a shuffle buffer, for example, whose samples are not part of it) is not used.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.train.data.fingerprint import Outline, outline
from launcher.train.data.randomness import SampleRandom

# samples of which outlines are compared
OUTLINED_SAMPLES = 4


class StreamState(NamedTuple):
    """State of a stream before it was read for a window.

    Args:
        window: index of the window in the run.
        rank: the rank whose share it is, of a stream that shards itself; None: it is that of every rank.
        position: samples read in the epoch.
        stream: what ``state_dict`` returned.
        random: state of the random numbers that the stream draws.
        following: outlines of the samples that follow.
    """

    window: int
    rank: int | None
    position: int
    stream: Any
    random: Any
    following: list[Any]


def outlines_of(samples: Iterable[Any]) -> list[Any]:
    """Return the outlines of the first samples as tuples."""
    return [tuple(outline(sample)) for sample in itertools.islice(samples, OUTLINED_SAMPLES)]


class StreamReader:
    """The samples of one epoch of a stream, read in blocks, with random numbers of its own."""

    def __init__(self, dataset: Iterable[Any], random: SampleRandom, epoch: int) -> None:
        self._random, self._epoch = random, epoch
        with random.continued(epoch):
            self._samples: Iterator[Any] = iter(dataset)
        holders: list[Any] = [dataset, self._samples]
        self._owner: Any = next((each for each in holders if has_state(each)), None)

    @classmethod
    def restored(
        cls, dataset: Iterable[Any], random: SampleRandom, epoch: int, state: StreamState
    ) -> StreamReader | None:
        """Return a reader that continues from ``state``; None if the stream does not continue as it did then.

        A copy of the data set is read: loading a state may change what its later epochs begin with.
        """
        try:
            dataset = copy.deepcopy(dataset)
            if has_state(dataset):
                dataset.load_state_dict(state.stream)  # pyright: ignore[reportAttributeAccessIssue]
            reader = cls(dataset, random, epoch)
            if reader._owner is None:
                return None
            if reader._owner is not dataset:
                reader._owner.load_state_dict(state.stream)
            # not before: an iterator may draw when it is made, which it did with the epoch's first random numbers
            random.stream_state = state.random
            following = reader.read(len(state.following))
        except Exception:  # open files cannot be copied, and a stream may refuse its state, also when it is read
            return None
        pairs = zip(outlines_of(following), state.following, strict=False)
        if len(following) < len(state.following) or not all(Outline(*a).agrees(Outline(*b)) for a, b in pairs):
            return None
        reader._samples = itertools.chain(following, reader._samples)
        return reader

    def read(self, size: int) -> list[Any]:
        """Return the next ``size`` samples; fewer at the end."""
        with self._random.continued(self._epoch):
            return list(itertools.islice(self._samples, size))

    def state(self, window: int, rank: int | None, position: int) -> StreamState | None:
        """Return the present state, without the samples that follow; None if the stream has none."""
        if self._owner is None:
            return None
        stream = copy.deepcopy(self._owner.state_dict())
        return StreamState(window, rank, position, stream, self._random.stream_state, [])


def has_state(stream: Any) -> bool:
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


class StreamCheckpoint:
    """A rank's part of the stream's state in checkpoints.

    If the stream shards itself, each rank saves and loads its own state. Otherwise all ranks read the same stream, and
    its state before a window does not depend on the number of ranks: rank 0 saves it, and all ranks load it.
    """

    def __init__(self) -> None:
        self.source: Callable[[], StreamState | None] = lambda: None
        self._restored: StreamState | None = None
        self._reported = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state at the next window, as the text of a JSON object; empty if it is not known."""
        state = self.source()
        if state is None:
            return {}
        try:
            text = json.dumps(state._replace(random=_random_to_json(state.random)))
            exact = StreamState(*json.loads(text)).stream == state.stream
        except (TypeError, ValueError):
            text, exact = "", False
        if not exact:
            if not self._reported:
                self._reported = True
                print("The state of the stream has values that JSON cannot hold: a resume reads it again.", flush=True)
            return {}
        return {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        if "json" in tensors:
            state = StreamState(*json.loads(bytes(tensors["json"].cpu().tolist())))
            self._restored = state._replace(random=_random_from_json(state.random))

    def restored(self, window: int, rank: int) -> StreamState | None:
        """Return the restored state if it is that of ``window`` and ``rank``."""
        state = self._restored
        return state if state is not None and state.window == window and state.rank in (None, rank) else None


def _random_to_json(state: Any) -> Any:
    if state is None:
        return None
    torch_state, python_state, numpy_state = state
    if numpy_state:
        generator = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
        numpy_state = {**numpy_state, "state": generator}
    return torch_state.tolist(), python_state, numpy_state


def _random_from_json(state: Any) -> Any:
    if state is None:
        return None
    torch_state, (version, words, gauss), numpy_state = state
    if numpy_state:
        import numpy

        numpy_state["state"]["key"] = numpy.array(numpy_state["state"]["key"], numpy.uint32)
    return torch.tensor(torch_state, dtype=torch.uint8), (version, tuple(words), gauss), numpy_state
