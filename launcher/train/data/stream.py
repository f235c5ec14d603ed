"""Reading of a stream: the shards that this rank reads, in turn, its micro-batches, and its state in checkpoints.

A stream has a state if it, or the iterator that it returns, has the methods ``state_dict`` and ``load_state_dict``, as
those of Hugging Face and torchdata have: a resume does not read again what was read before. The stream is read ahead of
the step, in a loader process, so its state is taken before each window is read, and sent with it. Outlines of the
samples that follow are saved with the state: a state that does not lead to them (of a shuffle buffer, for example,
whose samples are not part of it) is not used.
"""

from __future__ import annotations

import collections
import copy
import io
import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from launcher.errors import DataError, WrongCheckpoint
from launcher.plan.batch import Batch
from launcher.plan.data_shards import Division, has_hidden_state
from launcher.plan.windows import share_of_window
from launcher.quantities import count
from launcher.task import seed_for
from launcher.train.data.fingerprint import Outline, outline
from launcher.train.data.loader import Collate, copied
from launcher.train.data.randomness import SampleRandom, as_tensors

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


# what torch raises for a value that it cannot save, or not load without executing code
_UNUSABLE = (pickle.PickleError, AttributeError, TypeError, RuntimeError)


class Identified(NamedTuple):
    """A batch whose ``identity`` is compared in its place. ``samples``: number in it, if that is known."""

    sample: Any
    identity: Any
    samples: int | None = None


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
            random.continue_from(state.random)
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
        self._source: Callable[[], list[StreamState] | None] = lambda: None
        self._own_shards = 0
        self._restored: list[StreamState] = []
        self._restored_own_shards: set[int] = set()
        self._reported = False

    def follow(self, source: Callable[[], list[StreamState] | None], own_shards: int, *, within_epoch: bool) -> None:
        """Save what ``source`` returns: the states of the shards that this rank reads; None if one is not known.

        Args:
            own_shards: number of shards that the stream has; 0 if it is not divided.
            within_epoch: the stream is read from a position within an epoch.

        Raises:
            WrongCheckpoint: it had another number when it was saved: samples would be lost, or read twice.
        """
        self._source, self._own_shards = source, own_shards
        for saved in self._restored_own_shards - {own_shards} if within_epoch else ():
            raise WrongCheckpoint(
                f"The stream has {count(own_shards, 'shard')} of its own, and had {saved} when the checkpoint was "
                "saved, within an epoch: it would be divided in another way.\n"
                "  Resume with the files that the stream had; or start a new run: launch train."
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states at the next window, as bytes that ``torch.save`` wrote; empty if nothing is known."""
        states, own_shards = self._source() or (), self._own_shards
        try:
            known = [
                each._replace(stream=_plain(each.stream), random=each.random and as_tensors(each.random))
                for each in states
            ]
            content = _saved(own_shards, known)
        except _UNUSABLE as error:
            known = []
            content = _saved(own_shards, known)
            if not self._reported:
                self._reported = True
                why = str(error).partition("WeightsUnpickler error: ")[2] or str(error)  # without torch's advice
                print(
                    "The state of the stream has values that no checkpoint holds: a resume reads it again.\n"
                    f"  {why.strip().partition('. ')[0]}.\n"
                    "  Keep tensors, numbers, texts, and lists, tuples and dicts of them in it.",
                    flush=True,
                )
        return {"states": torch.frombuffer(content, dtype=torch.uint8)} if known or own_shards else {}

    def load_state_dict(self, of_ranks: Iterable[Mapping[str, Tensor]]) -> None:
        """Restore what ``state_dict`` returned on all ranks. The stream is read again if this version of torch does not
        accept it."""
        for tensors in of_ranks:
            if "states" in tensors:
                try:
                    own_shards, states = _loaded(bytes(tensors["states"].cpu().numpy()))
                except _UNUSABLE:
                    continue
                self._restored_own_shards |= {own_shards} - {0}
                self._restored += [StreamState(*each) for each in states]

    def restored(self, window: int, rank: int, shards: Iterable[int]) -> dict[int, StreamState] | None:
        """Return the restored states of ``shards``; None if one of them is not known for ``window`` and ``rank``."""
        found = {
            state.shard: state for state in self._restored if state.window == window and state.rank in (None, rank)
        }
        return {shard: found[shard] for shard in shards} if all(shard in found for shard in shards) else None


def _saved(own_shards: int, states: Iterable[StreamState]) -> bytearray:
    """Return the states as bytes, which ``_loaded`` accepts."""
    file = io.BytesIO()
    torch.save((own_shards, [tuple(state) for state in states]), file)
    _loaded(file.getvalue())
    return bytearray(file.getvalue())


def _loaded(content: bytes) -> tuple[int, list[tuple[Any, ...]]]:
    """Return what ``_saved`` was given. Tensors of a GPU are on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _plain(value: Any) -> Any:
    """Return ``value`` with numbers of NumPy, and with subclasses of Python's own types, as those types, which can be
    loaded without executing code."""
    numpy: Any = sys.modules.get("numpy")
    match value:
        case _ if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        case dict():
            kind = type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
            return kind({_plain(key): _plain(each) for key, each in value.items()})
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return tuple(_plain(each) for each in value)
        case bool():
            return value
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)  # not str(value): that of an enum is its name
        case _:
            return value


def is_sharded(stream: Any) -> bool:
    """Return whether the stream divides itself among the ranks."""
    return bool(getattr(stream, "sharded", False))


def start_epoch(stream: Any, epoch: int) -> None:
    """Call ``stream.set_epoch(epoch)`` if it has that method."""
    if callable(getattr(stream, "set_epoch", None)):
        stream.set_epoch(epoch)


class SampleBlock(NamedTuple):
    """The next ``size`` positions of a reader. ``number``: that of this rank's micro-batch in the window; None if the
    samples are another rank's."""

    size: int
    number: int | None


class Round(NamedTuple):
    """The blocks of a window. ``window``: index in the run."""

    window: int
    blocks: list[SampleBlock]


# (process, first window) -> rounds
Rounds = Callable[[int, int], Iterator[Round]]


def blocks_in_turn(size: int, world_size: int, rank: int) -> Rounds:
    """Return rounds of one block of equal size for each rank."""
    blocks = [SampleBlock(size, 0 if each == rank else None) for each in range(world_size)]
    return lambda process, first: (Round(index, blocks) for index in itertools.count(first))  # noqa: ARG005


def blocks_of_windows(batch: Batch, rank: int, division: Division = Division()) -> Rounds:  # noqa: B008 (frozen)
    """Return the full windows of the run as rounds: the micro-batches of a reader, or of all ranks if each reads
    all."""

    def rounds(process: int, first: int) -> Iterator[Round]:
        for index in itertools.count(first):
            size, count = batch.global_size_at(index), batch.accumulation_at(index)
            if division.ranks == batch.world_size:
                numbers = range(process, count, division.processes)
                base, extra = divmod(size // division.readers, len(numbers))
                blocks = [SampleBlock(base + (n < extra), number) for n, number in enumerate(numbers)]
            else:
                shares = [share_of_window(size, batch, each) for each in range(batch.world_size)]
                turns = itertools.product(range(count), range(batch.world_size))
                blocks = [SampleBlock(len(shares[who][n]), n if who == rank else None) for n, who in turns]
            yield Round(index, blocks)

    return rounds


class StreamNote(NamedTuple):
    """Sent with each micro-batch of a stream.

    Args:
        window: index in the run.
        number: of the micro-batch in the window; None: it is only a stand-in, for a share without samples.
        states: with a reader's first micro-batch of a window: states of its shards before that window, except for
            shards that are over; None if a state is not known.
        outlines: with the first micro-batch: outlines of the first samples, to be compared between ranks.
    """

    window: int
    number: int | None
    states: list[StreamState] | None = None
    outlines: list[Any] = []  # noqa: RUF012 (never changed)


@dataclass(eq=False)
class StreamShare(IterableDataset[tuple[Any, int, StreamNote]]):
    """This rank's micro-batches of one epoch of a stream.

    A reader reads its shards in turn: position k of its rounds is the next sample of shard k mod (number of its
    shards), or empty if that shard is over. It sends all micro-batches of a window, also those without a sample, as
    long as one of its shards has a sample for that window.

    Args:
        rounds: division of the epoch into blocks.
        division: shards of the stream, and readers.
        rank: this rank.
        first: index of the epoch's first window.
        start: windows before it are read and dropped.
        saves: send the states of the shards before each window but the first.
        outlined: send the outlines of the first samples.
        restored: states of this rank's shards before window ``start``, which continue from there if they can.
    """

    dataset: Any
    rounds: Rounds
    collate: Collate
    seed: int
    epoch: int
    _: KW_ONLY
    division: Division = Division()  # noqa: RUF009 (frozen)
    rank: int = 0
    first: int = 0
    start: int = 0
    saves: bool = False
    outlined: bool = False
    restored: Mapping[int, StreamState] | None = None

    def __post_init__(self) -> None:
        self._sharded, self._collating = is_sharded(self.dataset), SampleRandom(self.seed)

    def __iter__(self) -> Iterator[tuple[Any, int, StreamNote]]:
        process = _take_process_number()
        readers, first, position = self._open(process)
        stride, own = self.division.readers, self.division.reader(self.rank, process)
        outlines: list[Any] = []
        newest: list[Any] = []  # this rank's last samples; before it has one, any rank's
        sends_outlines, sent = self.outlined and process == 0 and not self._sharded, False
        if sends_outlines and stride > 1:
            outlines, sends_outlines = self._outlines_of_ends(), False
        for window, blocks in self.rounds(process, first):
            if self._sharded:
                blocks = [block for block in blocks if block.number is not None]
            each = sum(size for size, _ in blocks) // len(readers)
            saves = self.saves and window > first and window >= self.start
            states = self._states(readers, window, position) if saves and each else None
            compared = max(1, min(each, OUTLINED_SAMPLES)) if states is not None or sends_outlines else 1
            ahead = [reader.peek(compared) for reader in readers]
            if not any(ahead):
                break
            if states is not None:
                states = [s._replace(following=outlines_of(a)) for s, a in zip(states, ahead, strict=True) if s and a]
            if sends_outlines:
                outlines, sends_outlines = outlines_of(itertools.chain(*ahead)), False
            at = 0
            for size, number in blocks:
                block = _read(readers, at, size)
                if block and (number is not None or not newest):
                    newest = block
                newest = newest or next(filter(None, ahead), [])
                if number is not None and window >= self.start:
                    note = StreamNote(window, number, states, outlines)
                    yield self._collated(block or newest, position + own), len(block), note
                    states, outlines, sent = None, [], True
                at, position = at + size, position + size * stride
        if not sent and (newest := newest or self._any_sample()):
            note = StreamNote(self.start, None, None, outlines)
            yield self._collated(newest, position + own), 0, note

    def _open(self, process: int) -> tuple[list[StreamReader], int, int]:
        """Return the readers of this process's shards, the index of the first window that they read, and the positions
        before it."""
        self._shards = shards = self.division.shards_of(self.rank, process)
        if self.restored is not None:
            states = [self.restored[shard] for shard in shards]
            readers = [self._restored_reader(state) for state in states]
            found = [reader for reader in readers if reader is not None]
            if len(found) == len(states):
                return found, self.start, max(state.position for state in states)
            if self.rank == process == 0:
                print(
                    "The state of the stream in the checkpoint does not lead to the samples that followed it: a "
                    "shuffle buffer,\n  for example, is not part of it. The epoch so far is read again.",
                    flush=True,
                )
        return [self._reader(shard) for shard in shards], self.first, 0

    def _reader(self, shard: int) -> StreamReader:
        return StreamReader(self._stream(shard), self._random(shard), self.epoch)

    def _restored_reader(self, state: StreamState) -> StreamReader | None:
        if state.over:
            return StreamReader((), self._random(state.shard), self.epoch)
        return StreamReader.restored(self._stream(state.shard), self._random(state.shard), self.epoch, state)

    def _stream(self, shard: int) -> Iterable[Any]:
        """Return a shard, which shares no state with the stream and its other shards."""
        if self.division.shards == 1:
            return self.dataset
        random = SampleRandom(self.seed)
        with random.own():
            random.seed(self.epoch, -1)  # a stream that draws while it is divided draws the same for every shard
            part = self.dataset.shard(num_shards=self.division.shards, index=shard)
            try:
                part = copy.deepcopy(part)  # it may be a shallow copy, whose generator is that of all shards
            except Exception as error:
                raise DataError(
                    f"A shard of the stream cannot be copied: {type(error).__name__}: {error}\n"
                    "  Open files in __iter__; or use train.data_shards=1."
                ) from error
            start_epoch(part, self.epoch)
        return part

    def _random(self, shard: int) -> SampleRandom:
        """Return the random numbers of a shard, which do not depend on when the others are read."""
        return SampleRandom(self.seed if self.division.shards == 1 else seed_for(self.seed, f"shard/{shard}"))

    def _states(self, readers: list[StreamReader], window: int, position: int) -> list[StreamState | None] | None:
        """Return the present state of each shard, None for one that is over; None if the state of any is not known."""
        states: list[StreamState | None] = []
        rank = self.rank if self._sharded else None
        for shard, reader in zip(self._shards, readers, strict=True):
            parts = reader.state()
            if parts is None and not reader.over:
                return None
            states.append(None if parts is None else StreamState(window, rank, position, *parts, [], shard))
        return states

    def _outlines_of_ends(self) -> list[Any]:
        """Return the outlines of the beginnings of the first and the last shard, which every rank reads once."""
        ends = dict.fromkeys((0, self.division.shards - 1))
        return outlines_of(itertools.chain(*(self._reader(shard).take(1) for shard in ends)))

    def _any_sample(self) -> list[Any]:
        """Return a sample of the stream, for a reader whose shards have none."""
        if self.restored is None and self.division.shards == 1:
            return []
        samples = (self._reader(shard).take(1) for shard in range(self.division.shards))
        return next(filter(None, samples), [])

    def _collated(self, samples: list[Any], position: int) -> Any:
        with self._collating.own():
            self._collating.seed(self.epoch, position)
            return self.collate(samples)


def _read(readers: list[StreamReader], first: int, size: int) -> list[Any]:
    """Return the samples at positions [first, first + size), at each of which it is the turn of one reader."""
    turns = [position % len(readers) for position in range(first, first + size)]
    read = {turn: iter(readers[turn].take(number)) for turn, number in collections.Counter(turns).items()}
    return [sample for turn in turns for sample in itertools.islice(read[turn], 1)]


def _take_process_number() -> int:
    """Return the number of this loader process, and hide it from the stream.

    Streams of Hugging Face, and others, read a part of their samples in a loader process, or draw other random numbers,
    and the order of the samples would depend on the number of processes.
    """
    info = get_worker_info()
    worker._worker_info = None  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return 0 if info is None else info.id
