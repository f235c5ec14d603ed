"""The model of torch's caching allocator: cases computed by hand, and a slow reference with an array of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.gpus import ALLOCATION_BYTES
from launcher.train.inspection.caching_allocator import (
    LARGE_SEGMENT,
    LEAST_OWN,
    MIB,
    MIN_BLOCK,
    SMALL,
    SMALL_SEGMENT,
    CachingAllocator,
    DeviceFull,
    MemoryBlock,
    is_expandable,
    reserved_by,
    reserved_peak,
)
from tests.helpers import make_plan

KIB = 2**10


def reserved(events: Sequence[int], **options: Any) -> int:
    """Return what is reserved for events of the default stream."""
    return reserved_peak([(size, 0) for size in events], **options)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([512 * KIB] * 4, 2 * MIB),
        ([512 * KIB] * 5, 4 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        # 19 MiB minus 512 bytes are left for the second one, which is not small: it has the rest
        ([MIB + 1, 9 * MIB], 20 * MIB),
        ([MIB, 9 * MIB], 22 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB + 1], 40 * MIB),
        # a rest of 1 MiB stays part of its large block
        ([9 * MIB, 10 * MIB, MIB + 512], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([30 * MIB, -30 * MIB, 12 * MIB, 12 * MIB], 30 * MIB),
        ([30 * MIB, -30 * MIB, 31 * MIB], 62 * MIB),  # cached memory that nothing can use
        # the free space in the middle is large enough for neither, although both would fit into what is free
        ([12 * MIB, 12 * MIB, 12 * MIB, -12 * MIB, 14 * MIB], 50 * MIB),
        # a hole of a small block serves no large one
        ([SMALL] * 40 + [-SMALL] * 40 + [20 * MIB], 60 * MIB),
        # neighbours merge when both are free
        ([40 * MIB, -40 * MIB, 20 * MIB, 18 * MIB, -18 * MIB, -20 * MIB, 40 * MIB], 40 * MIB),
    ],
)
def test_by_hand(events: list[int], expected: int) -> None:
    assert reserved(events) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([1], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([30 * MIB], 40 * MIB),
        ([30 * MIB, -30 * MIB, 31 * MIB], 40 * MIB),
        ([30 * MIB, -30 * MIB, 41 * MIB], 60 * MIB),  # the segment grows by one page of 20 MiB
        ([12 * MIB, 12 * MIB, 12 * MIB, -12 * MIB, 14 * MIB], 40 * MIB),
        # a hole goes first: the end of the segment could still grow
        ([6 * MIB, 8 * MIB, 7 * MIB, -6 * MIB, 5 * MIB, 19 * MIB], 40 * MIB),
    ],
)
def test_expandable_segments_by_hand(events: list[int], expected: int) -> None:
    assert reserved(events, expandable=True) == expected


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    events = [30 * MIB, -30 * MIB, 40 * MIB]
    assert reserved(events) == 70 * MIB
    assert reserved(events, capacity=60 * MIB) == 40 * MIB
    assert reserved(events, capacity=39 * MIB) == 70 * MIB, "it does not fit, and says so"
    # one live block keeps its whole segment
    held = [30 * MIB, -30 * MIB, 4 * MIB, 40 * MIB]
    assert reserved(held, capacity=69 * MIB) == 70 * MIB > 69 * MIB
    allocator = CachingAllocator(capacity=2 * MIB)
    allocator.allocate(SMALL)
    with pytest.raises(DeviceFull):
        allocator.allocate(SMALL + 1)


@pytest.mark.parametrize("expandable", [False, True])
def test_streams_share_no_memory(expandable: bool) -> None:
    size = 40 * MIB
    freed = [(size, 1), (-size, 1)]
    assert reserved_peak([*freed, (size, 1)], expandable=expandable) == size
    assert reserved_peak([*freed, (size, 2)], expandable=expandable) == 2 * size
    # a small block takes a segment of its own in each stream, and frees return to the stream of the allocation
    small = [(1, 0), (1, 1), (1, 2), (-1, 1), (1, 1)]
    assert reserved_peak(small, expandable=expandable) == 3 * SMALL_SEGMENT


def test_two_gathers_in_flight_by_hand() -> None:
    """Units of 60 MiB are gathered in stream 1, one while the one before is still there, and copied in stream 0: stream
    1 keeps both buffers, and stream 0 the parameters of one unit, which the next unit gets."""
    unit = 60 * MIB
    events = [(unit, 1), (unit, 0)]
    for _ in range(3):
        events += [(unit, 1), (-unit, 1), (-unit, 0), (unit, 0)]
    assert reserved_peak(events) == 3 * unit
    assert reserved_peak([(size, 0) for size, _ in events]) == 3 * unit
    # the gradients that stream 0 allocates afterwards find only what stream 0 has freed
    events += [(-unit, 1), (-unit, 0), (unit, 0), (unit, 0)]
    assert reserved_peak(events) == 4 * unit
    assert reserved_peak([(size, 0) for size, _ in events]) == 3 * unit


def test_segments_of_all_streams_are_given_back_before_memory_runs_out() -> None:
    events = [(40 * MIB, 1), (-40 * MIB, 1), (40 * MIB, 0)]
    assert reserved_peak(events, capacity=80 * MIB) == 80 * MIB
    assert reserved_peak(events, capacity=79 * MIB) == 40 * MIB


class Reference:
    """The same rules on a map of 512-byte cells for each segment, searched from the start each time."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[int]]] = []  # (small, number of the block that each cell belongs to)
        self.live: set[int] = set()
        self.count = 0

    @property
    def reserved(self) -> int:
        return sum(len(cells) for _, cells in self.segments) * MIN_BLOCK

    def allocate(self, size: int) -> int:
        cells = max(1, -(-size // MIN_BLOCK))
        small = cells * MIN_BLOCK <= SMALL
        fits = [
            (length, index, start)
            for index, (is_small, _) in enumerate(self.segments)
            for start, length in self.holes(index)
            if is_small == small and length >= cells
        ]
        if fits:
            length, index, start = min(fits)
        else:
            round_up = -(-cells * MIN_BLOCK // (2 * MIB)) * 2 * MIB
            large = LARGE_SEGMENT if cells * MIN_BLOCK < LEAST_OWN else round_up
            length, index, start = (SMALL_SEGMENT if small else large) // MIN_BLOCK, len(self.segments), 0
            self.segments.append((small, [0] * length))
        rest = (length - cells) * MIN_BLOCK
        taken = cells if (rest if small else rest > SMALL) else length
        self.count += 1
        self.live.add(self.count)
        self.segments[index][1][start : start + taken] = [self.count] * taken
        return self.count

    def holes(self, index: int) -> list[tuple[int, int]]:
        """Runs of free cells of a segment: first, number."""
        found: list[tuple[int, int]] = []
        start: int | None = None
        for place, owner in enumerate([*self.segments[index][1], -1]):
            if owner == 0 and start is None:
                start = place
            elif owner and start is not None:
                found.append((start, place - start))
                start = None
        return found

    def free(self, block: int) -> None:
        self.live.remove(block)
        for _, cells in self.segments:
            cells[:] = [0 if owner == block else owner for owner in cells]


SIZES = st.one_of(
    st.integers(1, 3 * KIB), st.integers(1, MIB), st.integers(MIB, 3 * MIB), st.integers(MIB, 24 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 512, 10 * MIB - 1, 10 * MIB, 20 * MIB - MIB, 20 * MIB]),
)  # fmt: skip
# a size to allocate, or which of the live blocks to free
STEPS = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=25)


@given(STEPS)
def test_the_reserved_bytes_of_any_sequence_are_those_of_the_reference(steps: list[int]) -> None:
    model, reference = CachingAllocator(), Reference()
    live: list[tuple[MemoryBlock, int]] = []
    for step in steps:
        if step > 0:
            live.append((model.allocate(step), reference.allocate(step)))
        elif live:
            block, number = live.pop(step % len(live))
            model.free(block)
            reference.free(number)
        assert model.reserved == reference.reserved


@given(STEPS, st.booleans())
def test_what_holds_for_any_sequence(steps: list[int], expandable: bool) -> None:
    model = CachingAllocator(expandable=expandable)
    live: list[tuple[MemoryBlock, int]] = []
    for step in steps:
        if step > 0:
            live.append((model.allocate(step), step))
        elif live:
            block, _ = live.pop(step % len(live))
            model.free(block)
        rounded = sum(-(-size // MIN_BLOCK) * MIN_BLOCK for _, size in live)
        assert rounded <= model.allocated <= model.reserved
        places = sorted((block.address, block.address + block.size) for block, _ in live if block.pool.small)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    for block, _ in live:
        model.free(block)
    assert model.allocated == 0


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_the_option_of_the_environment(env: Mapping[str, str], expected: bool) -> None:
    assert is_expandable(env) is expected


def test_which_plans_have_reserved_bytes() -> None:
    events = [(30 * MIB, 0), (-30 * MIB, 0), (31 * MIB, 0)]
    assert reserved_by(make_plan(), events) is None
    assert reserved_by(make_plan("cluster.gpu=h100"), events) == 62 * MIB


def test_the_smallest_allocation_is_that_of_the_log() -> None:
    assert ALLOCATION_BYTES == MIN_BLOCK
