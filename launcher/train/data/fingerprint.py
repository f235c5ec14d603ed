"""Fingerprints of data sets, by which the ranks check before the first step that they hold the same samples.

A window's samples are selected by index, so an index must mean the same sample on every rank. Otherwise some samples
are used twice in an epoch and others never, or held-out samples are trained on.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import hashlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from launcher.errors import DataError
from launcher.plan.data_shards import own_shards
from launcher.plan.run_plan import RunPlan
from launcher.task import is_mapped
from launcher.train.data.loader import prefetch
from launcher.train.data.randomness import Permutation, SampleRandom
from launcher.train.data.sample_order import ArrangedData
from launcher.train.world import Everyone

SAMPLES = 8
_REREADS = 16  # of a sample that differs: a random flip is the same in two reads by chance
# seconds after which a loader process reads no more samples: slow data must not delay the start
BUDGET_S = 1.0
# tolerance for rounding on different CPUs, relative to the spread of a tensor's elements or to a single number
_OF_SPREAD = 1e-5
# tolerance relative to the magnitude of the elements: 8 units in the last place of fp32
_OF_MAGNITUDE = 2.0**-20
# tolerance for different image decoders, in levels (of 256) of the mean over a part of an image
_LEVELS = 2.0
_PARTS = 32
_MOST_ELEMENTS = 2**20


class Outline(NamedTuple):
    """Summary of one sample in a few bytes.

    Args:
        digest: hash of structure, shapes, dtypes and exact contents (integers, text, bytes, positions of nan and inf).
        numbers: weighted means over parts of contents that may be rounded: floating-point numbers and uint8 images.
        limits: differences of these numbers that rounding can explain.
        exact: hash of all contents.
    """

    digest: str
    numbers: tuple[float, ...]
    limits: tuple[float, ...]
    exact: str

    def agrees(self, other: Outline) -> bool:
        if self.exact == other.exact:
            return True
        pairs = zip(self.numbers, other.numbers, self.limits, other.limits, strict=False)
        return self.digest == other.digest and all(abs(a - b) <= max(limits) for a, b, *limits in pairs)


def outline(sample: Any) -> Outline:
    """Return the outline of a sample: tensors, arrays, images, text, numbers, containers, and objects' attributes.

    The directory of an absolute path may be local to a host, and is left out of `digest`.
    """
    sketch = _Sketch()
    sketch.add(sample)
    return Outline(sketch.digest.hexdigest(), tuple(sketch.numbers), tuple(sketch.limits), sketch.exact.hexdigest())


class _Sketch:
    def __init__(self) -> None:
        self.digest, self.exact = hashlib.blake2b(digest_size=12), hashlib.blake2b(digest_size=12)
        self.numbers: list[float] = []
        self.limits: list[float] = []
        self._objects: set[int] = set()

    def add(self, value: Any) -> None:
        self._hash(f"{type(value).__name__}(".encode())
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, enum.Enum):
            self._hash(value.name.encode())
        elif isinstance(value, float | complex):
            self._add_tensor(
                torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
            )
        elif isinstance(value, bytes | bytearray):
            self._hash(value)
        elif isinstance(value, str | os.PathLike):
            self._add_text(str(value))  # pyright: ignore[reportUnknownArgumentType]
        elif value is None or isinstance(value, int):
            self._hash(str(value).encode())
        elif isinstance(value, Mapping):
            for key, entry in value.items():  # pyright: ignore[reportUnknownVariableType]
                self.add(key)
                self.add(entry)
        elif isinstance(value, list | tuple):
            self._add_sequence(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, set | frozenset):  # the order of iteration differs between processes
            self._add_sequence(sorted(value, key=outline))  # pyright: ignore[reportUnknownArgumentType]
        elif hasattr(value, "__array_interface__"):  # NumPy's arrays and scalars, and PIL's images
            self._add_array(value)
        elif not isinstance(value, type) and id(value) not in self._objects:
            self._objects.add(id(value))
            with contextlib.suppress(TypeError):  # an object without attributes
                self.add(object.__getstate__(value))
        self._hash(b")")

    def _hash(self, content: bytes | bytearray) -> None:
        self.digest.update(content)
        self.exact.update(content)

    def _add_text(self, text: str) -> None:
        self.exact.update(text.encode(errors="surrogatepass"))
        text = Path(text).name if Path(text).is_absolute() else text
        self.digest.update(text.encode(errors="surrogatepass"))

    def _add_sequence(self, values: Sequence[Any]) -> None:
        self._hash(f"{len(values)}:".encode())
        if values and all(type(value) is float for value in values):
            self._add_tensor(torch.tensor(values, dtype=torch.float64))
            return
        for value in values:
            self.add(value)

    def _add_array(self, value: Any) -> None:
        import numpy

        array = numpy.asarray(value)
        if array.dtype.kind in "biufc":
            self._add_tensor(torch.from_numpy(numpy.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))))
        elif array.dtype.kind in "SUMm":
            self._hash(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif array.dtype.kind == "O":
            self._hash(str(array.shape).encode())
            self._add_sequence(array.reshape(-1).tolist())

    def _add_tensor(self, value: Tensor) -> None:
        value = value.detach()
        if value.is_meta:
            self._hash(f"{value.dtype}{tuple(value.shape)}".encode())
            return
        if value.is_nested:
            self._add_sequence(value.unbind())
            return
        self._hash(f"{value.dtype}{value.layout}{tuple(value.shape)}".encode())
        if value.is_quantized:
            value = value.dequantize()
        if value.layout != torch.strided and value.layout != torch._mkldnn:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            sparse = value.to_sparse_coo().coalesce()
            self._add_tensor(sparse.indices())
            self._add_tensor(sparse.values())
            return
        dense = value.to_dense().cpu().resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.nbytes else b""
        self.exact.update(content)
        image = dense.dtype is torch.uint8 and dense.ndim >= 3
        if not (dense.is_floating_point() or dense.is_complex() or image):
            self.digest.update(content)
        elif dense.numel():
            relative = 0.0 if image else max(_OF_MAGNITUDE, torch.finfo(dense.dtype).eps)
            flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
            flat = flat[:: -(-flat.numel() // _MOST_ELEMENTS)].double()
            self._add_rounded(flat, _LEVELS if image else None, relative)

    def _add_rounded(self, flat: Tensor, absolute: float | None, relative: float) -> None:
        """Add the means of parts, with weights between 0.5 and 1.5 that depend on the elements' positions, so that a
        permutation changes the means."""
        special = torch.stack([flat.isnan(), flat.isposinf(), flat.isneginf()])
        self.digest.update(bytes(special.any(1).tolist()))
        if special.any():
            self.digest.update(ctypes.string_at(special.data_ptr(), special.nbytes))
        flat = flat.nan_to_num(0.0, 0.0, 0.0)
        if absolute is None:
            # median absolute deviation: one large element does not hide the others
            spread = (flat - flat.median()).abs().median() if flat.numel() > 1 else flat.abs()
            absolute = _OF_SPREAD * spread.item()
        weights = 1.0 + torch.arange(flat.numel(), dtype=torch.float64).cos() / 2
        size = -(-flat.numel() // _PARTS)
        for part, weight in zip(flat.split(size), weights.split(size), strict=True):
            self.numbers.append((part * weight).mean().item())
            self.limits.append(absolute + relative * part.abs().mean().item())


# outlines by data set and sample, and that of the number of samples; None: there was no time to read it
Fingerprint = dict[str, dict[str, Outline | None]]
_LENGTH = "length"


class _Read(NamedTuple):
    """Index of a sample of the data set ``name``, to be read ``times`` times in a row."""

    name: str
    sample: int
    times: int = 1


def require_same_data(
    datasets: Mapping[str, Any], plan: RunPlan, world: Everyone, device: torch.device, *, stored: bool = False
) -> Fingerprint:
    """Compare the data sets of all ranks: the kind, the length, and a few samples of each. All ranks call it.

    Samples are read as in training: in loader processes, if there are any, with random numbers of their own. Samples
    that differ between reads on one rank (an augmentation with its own generator) are ignored. The samples of a
    stream are compared when it is read (stream.py). If two data sets start with the same samples, a warning is
    printed.

    Args:
        datasets: data sets by their name in messages; a value of None means no data.
        stored: whether the result is needed, for checkpoints; otherwise it is empty where there is nothing to compare.

    Returns:
        The lengths, and the outlines of the samples that were read, for a later start of the run.

    Raises:
        DataError: a data set differs between ranks; raised on all ranks.
    """
    kinds = {name: _kind(data, plan.train.seed) for name, data in datasets.items()}
    if plan.train.data_shards > 1:
        trained_on = next(iter(datasets))
        kinds[trained_on] += f" of {own_shards(datasets[trained_on])} shards, divided into {plan.train.data_shards}"
    _require_same_kinds(world.of_all(kinds))
    mapped = {name: data for name, data in datasets.items() if is_mapped(data) and len(data)}
    if not mapped or (world.size == 1 and len(mapped) == 1 and not stored):
        return {}
    reads = [_Read(name, index) for name, data in mapped.items() for index in _indices(len(data), plan.train.seed)]
    own = [outlines[0] for outlines in _outlines(mapped, reads, plan, device)]
    of_samples = zip(reads, zip(*world.of_all(own), strict=True), strict=True)
    suspects = [read._replace(times=_REREADS) for read, outlines in of_samples if not _all_agree(outlines)]
    if suspects:
        again = [_stable(outlines) for outlines in _outlines(mapped, suspects, plan, device)]
        _require_stable_samples_agree(suspects, world.of_all(again))
    first_outlines: dict[str, list[Outline | None]] = {}
    found: Fingerprint = {name: {_LENGTH: outline(len(data))} for name, data in mapped.items()}
    for read, each in zip(reads, own, strict=True):
        first_outlines.setdefault(read.name, []).append(each)
        finite = each is not None and all(map(math.isfinite, (*each.numbers, *each.limits)))  # JSON has no others
        found[read.name][str(read.sample)] = each if finite else None
    trained_on = next(iter(datasets))
    if world.rank == 0 and (name := _same_beginning(first_outlines, trained_on)) is not None:
        print(
            f"{name} begins with the samples of {trained_on}: it may not be held out.\n  Both are built with "
            "the same random seed: a random split made in both yields complementary parts, but synthetic samples drawn "
            "in both are identical. Draw held-out samples from a separate generator.",
            flush=True,
        )
    return found


def other_data(
    before: Mapping[str, Mapping[str, Any]],
    now: Fingerprint,
    datasets: Mapping[str, Any],
    plan: RunPlan,
    device: torch.device,
) -> list[tuple[str, str]]:
    """Return the data sets that are not those of an earlier start of the run, each with a text on what differs. Samples
    that differ between reads are ignored, as between ranks.

    Args:
        before: result of ``require_same_data`` at that time, from JSON.
        now: its result of this start.
    """
    differing = [
        (name, sample, Outline(*earlier)) for name, samples in before.items() for sample, earlier in samples.items()
        if earlier is not None and (own := now.get(name, {}).get(sample)) is not None
        and not own.agrees(Outline(*earlier))
    ]  # fmt: skip
    found = {name: "it has another number of samples" for name, sample, _ in differing if sample == _LENGTH}
    suspects = [(_Read(name, int(sample), _REREADS), each) for name, sample, each in differing if name not in found]
    everything = _outlines(datasets, [read for read, _ in suspects], plan, device) if suspects else []
    for (read, earlier), outlines in zip(suspects, everything, strict=True):
        if (stable := _stable(outlines)) is not None and not stable.agrees(earlier):
            found.setdefault(read.name, f"sample {read.sample} is another one")
    return [*found.items()]


def require_same_stream(name: str, own: list[Outline], world: Everyone) -> None:
    """Compare the first samples of a stream that every rank can read whole. All ranks call it.

    Raises:
        DataError: a rank reads other samples; raised on all ranks.
    """
    everyone = world.of_all(own)
    for rank, of_rank in enumerate(everyone):
        for number, (expected, outline) in enumerate(zip(everyone[0], of_rank, strict=False)):
            if not expected.agrees(outline):
                raise DataError(
                    f"{name} differs between ranks: sample {number} of the stream on rank {rank} is not sample "
                    f"{number} on rank 0.\n  Every rank must have the whole stream, and takes its part. Shuffle and "
                    "augment with torch's, Python's or NumPy's\n  global generators, which are seeded alike, and sort "
                    "file names; or, where each rank has samples of its own,\n  set `sharded = True` on the data set."
                )


def _require_same_kinds(kinds: list[dict[str, str]]) -> None:
    """Raise DataError unless all ranks have data sets of the same names, kinds and lengths, in the same order.

    Args:
        kinds: by rank, each data set's kind by its name.
    """
    for name in dict.fromkeys(name for of_rank in kinds for name in of_rank):
        own = [of_rank.get(name, _NO_DATA) for of_rank in kinds]
        for rank, kind in enumerate(own):
            if kind != own[0]:
                raise DataError(f"{name} differs between ranks: {own[0]} on rank 0, {kind} on rank {rank}.\n{_REMEDY}")
    if any(list(of_rank) != list(kinds[0]) for of_rank in kinds):
        raise DataError(f"eval_data() has its sets in another order on some ranks: {list(kinds[0])[1:]} on rank 0.")


def _same_beginning(outlines: Mapping[str, list[Outline | None]], trained_on: str) -> str | None:
    """Return the name of a data set that starts with the same two samples as the one ``trained_on``, if these differ
    from each other."""
    ours = outlines.get(trained_on, [])
    for name, theirs in outlines.items():
        pairs = zip(ours[:2], theirs[:2], strict=False)
        same = [a for a, b in pairs if a is not None and b is not None and a.agrees(b)]
        if name != trained_on and len(same) == 2 and not same[0].agrees(same[1]):
            return name
    return None


_NO_DATA = "no data (None)"


def _kind(dataset: Any, seed: int) -> str:
    if dataset is None:
        return _NO_DATA
    if isinstance(dataset, ArrangedData):
        return f"{len(dataset)} samples{dataset.digests(seed)}"
    return f"{len(dataset)} samples" if is_mapped(dataset) else "a stream"


def _indices(count: int, seed: int) -> list[int]:
    drawn = Permutation(count, seed, 0).take(0, min(count, SAMPLES))
    return list(dict.fromkeys([0, min(1, count - 1), count - 1, *drawn]))[:SAMPLES]


def _all_agree(outlines: Iterable[Outline | None]) -> bool:
    """Return whether all outlines agree; None, a sample that was not read, is ignored."""
    read = [each for each in outlines if each is not None]
    return all(each.agrees(read[0]) for each in read)


def _stable(outlines: Sequence[Outline | None]) -> Outline | None:
    """Return the outline of a sample that was the same in all reads; None if it was not, or if a read failed."""
    return outlines[0] if None not in outlines and _all_agree(outlines) else None


def _require_stable_samples_agree(reads: list[_Read], everyone: list[list[Outline | None]]) -> None:
    """Raise DataError for the first sample that is the same in all reads on each rank and differs between ranks.

    Args:
        everyone: by rank, the outline of each sample; None if it is not the same in all reads.
    """
    for (name, index, _), outlines in zip(reads, zip(*everyone, strict=True), strict=True):
        for rank, each in enumerate(outlines):
            if None not in outlines and not _all_agree([outlines[0], each]):
                raise DataError(
                    f"{name} differs between ranks: sample {index} on rank {rank} is not sample {index} on rank 0.\n"
                    f"{_REMEDY}"
                )


_REMEDY = (
    "  Every rank must build the same data. While a task builds it, torch's, Python's and NumPy's global generators\n"
    "  are seeded alike on all ranks; a loop of your own must seed them before it builds data. Seed other generators,\n"
    "  sort file names, and give every host the same files."
)


def _outlines(
    datasets: Mapping[str, Any], reads: list[_Read], plan: RunPlan, device: torch.device
) -> list[list[Outline | None]]:
    """Return the outlines of the samples, as many of each as its ``times``; None for a read that failed or was skipped
    for lack of time."""
    source = _OutlineReader(datasets, plan.train.seed)
    batches = prefetch(source, plan, device, plan.train.seed, order=reads)
    return [[None if each is None else Outline(*each) for each in batch.data] for batch in batches]


class _OutlineReader(Dataset[tuple[Any, int]]):
    def __init__(self, datasets: Mapping[str, Any], seed: int) -> None:
        self._datasets, self._random = datasets, SampleRandom(seed)
        self._spent_s = 0.0

    def __getitem__(self, read: _Read) -> tuple[list[Any], int]:
        if self._spent_s > BUDGET_S and read.times == 1:
            return [None], 1
        started = time.perf_counter()
        outlines = [self._outline(self._datasets[read.name], read.sample) for _ in range(read.times)]
        self._spent_s += time.perf_counter() - started
        return outlines, 1

    def _outline(self, dataset: Any, index: int) -> tuple[Any, ...] | None:
        with self._random.own():
            self._random.seed(0, index)
            try:
                return tuple(outline(dataset[index]))
            except Exception:  # the error recurs in training or evaluation, which reports where it happened
                return None
