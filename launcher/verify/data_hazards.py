"""Data hazards: data that differs between ranks or between readings. All ranks must call the probes together."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import pickle
from collections.abc import Sized
from typing import Any

from torch import Tensor

from launcher.plan.run_plan import RunPlan
from launcher.train.data.randomness import Permutation, SampleRandom
from launcher.train.data.window_feed import Shard, blocks_in_turn
from launcher.train.world import World
from launcher.verify.certificate import Effect, Hazard

# number of samples that are compared
LOOKED_AT = 64


def probe_length(dataset: Any, plan: RunPlan, world: World) -> Hazard | None:
    """Return the hazard if a rank's dataset length differs from the plan, which the engine would refuse."""
    if plan.task.samples is None:
        return None
    lengths = world.of_all(len(dataset) if isinstance(dataset, Sized) else None)
    if set(lengths) == {plan.task.samples}:
        return None
    return _differs(f"lengths by rank: {', '.join(map(str, lengths))}; the plan was made for {plan.task.samples}")


def probe_data(dataset: Any, plan: RunPlan, world: World) -> list[Hazard]:
    """Return the hazards in the data, the same on every rank."""
    if plan.task.samples is None:
        return _of_stream(dataset, plan, world)
    return _of_map(dataset, plan, world, min(LOOKED_AT, plan.task.samples))


def _of_map(dataset: Any, plan: RunPlan, world: World, count: int) -> list[Hazard]:
    assert plan.task.samples is not None
    indices = Permutation(plan.task.samples, plan.train.seed, 0).take(0, count)

    def read(seed: int) -> list[str]:
        random = SampleRandom(seed)
        prints: list[str] = []
        for place, index in enumerate(indices):
            with random.own():
                random.seed(0, place)
                prints.append(_fingerprint(dataset[index]))
        return prints

    first, again, other = read(plan.train.seed), read(plan.train.seed), read(plan.train.seed + 1)
    everyone = world.of_all((first, _different(first, again), _different(first, other)))
    # data that changes between readings cannot be compared further
    if unstable := sorted({place for _, places, _ in everyone for place in places}):
        return [_unstable(f"{len(unstable)} of {count} samples, the one with index {indices[unstable[0]]} first")]
    found: list[Hazard] = []
    if differ := sorted({place for prints, _, _ in everyone for place in _different(everyone[0][0], prints)}):
        found.append(_differs(f"{len(differ)} of {count} samples, the one with index {indices[differ[0]]} first"))
    if any(random for _, _, random in everyone):
        found.append(
            Hazard(
                name="random data",
                effect=Effect.noted,
                seen="Samples depend on random numbers: augmentation.",
                matters="The numbers are fixed by the sample's place in its epoch, so a run repeats itself in any "
                "world.",
                remedy="Nothing. The comparison reads every sample with its own numbers.",
            )
        )
    return found


def _of_stream(dataset: Any, plan: RunPlan, world: World) -> list[Hazard]:
    sharded = bool(getattr(dataset, "sharded", False))

    def read() -> list[str]:
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(0)
        blocks = Shard(dataset, blocks_in_turn(plan.batch.micro_size, 1, 0), list, plan.train.seed, 0)
        samples = itertools.chain.from_iterable(block or () for block, _ in blocks)
        return [_fingerprint(sample) for sample in itertools.islice(samples, LOOKED_AT)]

    first, again = read(), read()
    everyone = world.of_all((first, first != again))
    if any(unstable for _, unstable in everyone):
        return [_unstable("the beginning of the stream")]
    same = [prints == everyone[0][0] for prints, _ in everyone]
    if not sharded and not all(same):
        return [_differs(f"the beginning of the stream, on rank {same.index(False)} first")]
    if sharded and world.size > 1 and all(same):
        return [
            Hazard(
                name="a stream that is not sharded",
                effect=Effect.breaks,
                seen="The stream says sharded = True, and all ranks begin with the same samples.",
                matters="Each sample counts as many times as there are ranks.",
                remedy="Give each rank samples of its own, or leave the attribute out.",
            )
        ]
    return []


def _differs(what: str) -> Hazard:
    return Hazard(
        name="data that differs between ranks",
        effect=Effect.breaks,
        seen=f"Not alike on all ranks: {what}.",
        matters="A window's samples are found by their number, so all ranks must mean the same by it: else some "
        "samples are used twice in an epoch, and others never.",
        remedy="Make the data from what is the same everywhere: seed its shuffling, sort its files.",
    )


def _unstable(what: str) -> Hazard:
    return Hazard(
        name="data that is another one each time",
        effect=Effect.blinds,
        seen=f"Read twice with the same random numbers, it differs: {what}.",
        matters="Neither the big batch nor a resumed run can read what the micro-batches have read.",
        remedy="Draw from torch's, Python's or NumPy's global generators only: they are seeded for every sample.",
    )


def _different(one: list[str], two: list[str]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


class _Content(pickle.Pickler):
    """Pickler of tensors by value: a regular pickle contains the whole storage behind a view."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        content = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
        return bytes, (str((plain.dtype, tuple(plain.shape))).encode() + content,)


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, part: Any) -> int:
        self.hash.update(part)
        return len(part)


def _fingerprint(sample: Any) -> str:
    digest = _Digest()
    try:
        _Content(digest).dump(sample)  # pyright: ignore[reportArgumentType]
    except (pickle.PicklingError, TypeError, AttributeError):  # cannot be pickled, and therefore not compared
        return ""
    return digest.hash.hexdigest()
