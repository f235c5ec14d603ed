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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.errors import WrongCheckpoint
from launcher.quantities import count
from launcher.train.data.fingerprint import Outline, outline
from launcher.train.data.loader import copied
from launcher.train.data.randomness import SampleRandom
from launcher.train.data.stream_shards import has_hidden_state

# samples of which outlines are compared
OUTLINED_SAMPLES = 4


class StreamState(NamedTuple):
    """State of a stream, or of one of its shards, before it was read for a window.

    Args:
        window: index of the window in the run.
        rank: the rank whose share it is, of a stream that shards itself; None: it is that of every rank.
        position: samples read in the epoch by all readers.
        stream: what ``state_dict`` returned.
        random: state of the random numbers that the stream draws.
        following: outlines of the samples that follow.
        shard: number of the shard.
        over: there are no more samples.
    """

    window: int
    rank: int | None
    position: int
    stream: Any
    random: Any
    following: list[Any]
    shard: int = 0
    over: bool = False


class Identified(NamedTuple):
    """A batch whose ``identity`` is compared in its place. ``samples``: number in it, if that is known."""

    sample: Any
    identity: Any
    samples: int | None = None


class SavedShards(NamedTuple):
    """A rank's part of the state of a stream.

    Args:
        own_shards: number of shards that the stream had; 0 if it was not divided.
        states: of the shards that the rank reads; None if one is not known.
    """

    own_shards: int
    states: list[StreamState] | None


def outlines_of(samples: Iterable[Any]) -> list[Any]:
    """Return the outlines of the first samples as tuples."""
    first = itertools.islice(samples, OUTLINED_SAMPLES)
    return [tuple(outline(each.identity if isinstance(each, Identified) else each)) for each in first]


class StreamReader:
    """The samples of one epoch of a stream, or of one of its shards, with random numbers of its own.

    Attributes:
        over: all samples were taken.
    """

    def __init__(self, dataset: Iterable[Any], random: SampleRandom, epoch: int) -> None:
        self._random, self._epoch = random, epoch
        with random.continued(epoch):
            self._samples: Iterator[Any] = iter(dataset)
        holders: list[Any] = [dataset, self._samples]
        hidden = has_hidden_state(dataset)
        self._owner: Any = None if hidden else next((each for each in holders if has_state(each)), None)
        self._ahead: list[Any] = []  # read and not taken
        self._ended = False

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
            following = reader.peek(len(state.following))
        except Exception:  # open files cannot be copied, and a stream may refuse its state, also when it is read
            return None
        pairs = zip(outlines_of(following), state.following, strict=False)
        if len(following) < len(state.following) or not all(Outline(*a).agrees(Outline(*b)) for a, b in pairs):
            return None
        return reader

    def peek(self, size: int) -> list[Any]:
        """Return the next ``size`` samples, or fewer at the end, without taking them.

        Several are copied: a stream may write each sample into the same memory.
        """
        return self._read(size, copies=size > 1)

    def _read(self, size: int, *, copies: bool = False) -> list[Any]:
        if (missing := size - len(self._ahead)) > 0 and not self._ended:
            with self._random.continued(self._epoch):
                for _ in range(missing):  # not islice: it calls __iter__ again, in which a stream may start again
                    try:
                        sample = next(self._samples)
                        self._ahead.append(copied(sample) if copies else sample)
                    except StopIteration:
                        break
            self._ended = len(self._ahead) < size
        return self._ahead[:size]

    def take(self, size: int) -> list[Any]:
        """Return the next ``size`` samples; fewer at the end."""
        samples = self._read(size)
        del self._ahead[:size]
        return samples

    @property
    def over(self) -> bool:
        return self._ended and not self._ahead

    def state(self) -> tuple[Any, Any] | None:
        """Return the present state of the stream and of its random numbers; None if it has none, and if it was read
        further than samples were taken."""
        if self._owner is None or self._ahead or self._ended:
            return None
        return copy.deepcopy(self._owner.state_dict()), self._random.stream_state


def has_state(stream: Any) -> bool:
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


class StreamCheckpoint:
    """A rank's part of the stream's state in checkpoints.

    Each rank saves the states of the shards that it reads, except that rank 0 saves those that all ranks read. A rank
    loads the states that all ranks have saved, and uses those of the shards that it reads now: the state of a shard
    before a window does not depend on the number of ranks.
    """

    def __init__(self) -> None:
        self.source: Callable[[], SavedShards] = lambda: SavedShards(0, None)
        self._restored: list[StreamState] = []
        self._own_shards: set[int] = set()
        self._reported = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states at the next window, as the text of a JSON object; empty if nothing is known."""
        own_shards, states = self.source()
        texts: list[str] = []
        try:
            for state in states or ():
                texts.append(text := json.dumps(state._replace(random=_random_to_json(state.random))))
                if StreamState(*json.loads(text)).stream != state.stream:
                    raise ValueError
        except (TypeError, ValueError):
            texts = []
            if not self._reported:
                self._reported = True
                print("The state of the stream has values that JSON cannot hold: a resume reads it again.", flush=True)
        if not texts and not own_shards:
            return {}
        text = f'{{"own_shards": {own_shards}, "states": [{", ".join(texts)}]}}'
        return {"json": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def load_state_dict(self, of_ranks: Iterable[Mapping[str, Tensor]]) -> None:
        """Restore what ``state_dict`` returned on all ranks."""
        for tensors in of_ranks:
            if "json" not in tensors:
                continue
            saved = json.loads(bytes(tensors["json"].cpu().tolist()))
            self._own_shards |= {saved["own_shards"]} - {0}
            states = [StreamState(*each) for each in saved["states"]]
            self._restored += [state._replace(random=_random_from_json(state.random)) for state in states]

    def restored(self, window: int, rank: int, shards: Iterable[int]) -> dict[int, StreamState] | None:
        """Return the restored states of ``shards``; None if one of them is not known for ``window`` and ``rank``."""
        found = {
            state.shard: state for state in self._restored if state.window == window and state.rank in (None, rank)
        }
        return {shard: found[shard] for shard in shards} if all(shard in found for shard in shards) else None

    def require_own_shards(self, own_shards: int) -> None:
        """Check that the stream has as many shards of its own as when it was saved.

        Raises:
            WrongCheckpoint: it has not: samples would be lost, or read twice.
        """
        for saved in self._own_shards - {own_shards}:
            raise WrongCheckpoint(
                f"The stream has {count(own_shards, 'shard')} of its own, and had {saved} when the checkpoint was "
                "saved, within an epoch: it would be divided in another way.\n"
                "  Resume with the files that the stream had; or start a new run: launch train."
            )


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
