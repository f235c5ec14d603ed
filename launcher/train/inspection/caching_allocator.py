"""Model of torch's caching allocator for CUDA: the memory that it reserves for a sequence of allocations and frees.

The names in parentheses are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.13, ``DeviceCachingAllocator``; the
sizes are the constants of c10/core/AllocatorConfig.h, lines 16 to 25 and 340. Not modelled: the options
max_split_size_mb, roundup_power2_divisions and garbage_collection_threshold, which are off by default.

A block belongs to the stream in which it was allocated, and so does its segment: no allocation of another stream gets
it (get_free_block compares the streams of blocks; find_expandable_block those of segments). It is free as soon as
nothing refers to it: FSDP2 lets its streams wait for each other, and does not call ``record_stream``, which would delay
that until another stream has passed an event.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.config.schema import Device
from launcher.plan.gpus import find_gpu
from launcher.plan.run_plan import RunPlan

MIB = 2**20
MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to a multiple
SMALL = MIB  # kSmallSize: the largest allocation of the pool of small ones
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: what that pool asks the driver for
LARGE_SEGMENT = 20 * MIB  # large_segment_size: the same for allocations below LEAST_OWN
LEAST_OWN = 10 * MIB  # kMinLargeAlloc: from here on, a segment has the size of its allocation ...
ROUND_LARGE = 2 * MIB  # ... rounded up to a multiple (kRoundLarge)


class DeviceFull(Exception):
    """The capacity of a modelled device does not suffice."""


@dataclass(eq=False)
class MemoryBlock:
    """Part of a segment. ``prev`` and ``next`` are its neighbours in the segment."""

    address: int
    size: int
    pool: _Pool
    free: bool = False
    prev: MemoryBlock | None = None
    next: MemoryBlock | None = None


@dataclass(eq=False)
class _Pool:
    """Free blocks by size, then address (BlockPool)."""

    small: bool
    keys: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: dict[int, MemoryBlock] = field(default_factory=dict[int, MemoryBlock])  # by address
    last: MemoryBlock | None = None  # of the expandable segment

    def add(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        block.free = False
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]


class CachingAllocator:
    """Allocator of one device.

    Args:
        expandable: the option expandable_segments: each pool of a stream has one segment, which grows at its end.
        capacity: bytes that the device has; None: without limit. With it, cached segments are given back before memory
            runs out. Not for expandable segments, where ``reserved_peak`` says whether the memory suffices.

    Attributes:
        reserved, reserved_peak: bytes that are taken from the driver, and the most that were
            (``torch.cuda.max_memory_reserved``).
        allocated, allocated_peak: bytes in blocks that are in use (``torch.cuda.max_memory_allocated``).
    """

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self._expandable, self._capacity = expandable, capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}  # by stream, and whether it is that of small blocks
        self._next_address = 0
        self.reserved = self.reserved_peak = self.allocated = self.allocated_peak = 0

    def allocate(self, size: int, stream: int = 0) -> MemoryBlock:
        """Return a block of at least ``size`` bytes for a stream (malloc).

        Raises:
            DeviceFull: it would exceed the capacity.
        """
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)  # round_size
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = self._best_fit(pool, size)
        if block is None:
            block = self._grown(pool, size) if self._expandable else self._segment(pool, size)
        else:
            pool.remove(block)
        remaining = block.size - size
        # should_split: a large block keeps a small rest, so that it stays one
        if remaining >= MIN_BLOCK if pool.small or self._expandable else remaining > SMALL:
            rest = MemoryBlock(block.address + size, remaining, pool, prev=block, next=block.next)
            if block.next is not None:
                block.next.prev = rest
            elif pool.last is block:
                pool.last = rest
            block.next, block.size = rest, size
            pool.add(rest)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return ``block`` to its pool, merged with free neighbours (free_block, try_merge_blocks)."""
        self.allocated -= block.size
        pool = block.pool
        for other in (block.prev, block.next):
            if other is None or not other.free:
                continue
            pool.remove(other)
            first, second = (other, block) if other is block.prev else (block, other)
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.prev = first
            elif pool.last is second:
                pool.last = first
            block = first
        pool.add(block)

    def _best_fit(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """Return the smallest free block that is large enough (get_free_block)."""
        place = bisect_left(pool.keys, (size, -1))
        found = [pool.blocks[address] for _, address in pool.keys[place : place + 2]]
        # the end of an expandable segment counts as what it can grow to: it comes after any other block
        if len(found) == 2 and found[0] is pool.last:
            return found[1]
        return found[0] if found else None

    def _segment(self, pool: _Pool, size: int) -> MemoryBlock:
        """Return a block of the size of a new segment (get_allocation_size, alloc_block)."""
        wanted = _segment_bytes(size)
        if self._capacity is not None and self.reserved + wanted > self._capacity:
            self._release_cached()
            if self.reserved + wanted > self._capacity:
                raise DeviceFull
        self._reserve(wanted)
        self._next_address += wanted
        return MemoryBlock(self._next_address - wanted, wanted, pool)

    def _grown(self, pool: _Pool, size: int) -> MemoryBlock:
        """Return the end of the pool's expandable segment, grown by whole pages (try_allocate_expandable_block)."""
        page, last = SMALL_SEGMENT if pool.small else LARGE_SEGMENT, pool.last
        at_hand = last.size if last is not None and last.free else 0
        more = -(-(size - at_hand) // page) * page
        self._reserve(more)
        if last is not None and last.free:
            pool.remove(last)
            last.size += more
            return last
        address = 0 if last is None else last.address + last.size
        pool.last = MemoryBlock(address, more, pool, prev=last)
        if last is not None:
            last.next = pool.last
        return pool.last

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _release_cached(self) -> None:
        """Give the segments without a block in use back to the driver (release_cached_blocks)."""
        for pool in self._pools.values():
            for block in [*pool.blocks.values()]:
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size


def _segment_bytes(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LEAST_OWN else -(-size // ROUND_LARGE) * ROUND_LARGE


def reserved_peak(events: Iterable[tuple[int, int]], *, expandable: bool = False, capacity: int | None = None) -> int:
    """Return the most bytes that the allocator reserves for ``events``.

    A trace has sizes and no identities: a free ends the newest allocation of its size and stream, as backward passes
    do.

    Args:
        events: bytes of each allocation (positive) and each free (negative), and the number of its stream, in order.
        expandable: see ``CachingAllocator``.
        capacity: bytes of the device, to see whether they suffice if cached segments are given back. If they do not,
            the result is what would be reserved without a limit, which is more.
    """
    allocator = CachingAllocator(expandable=expandable, capacity=None if expandable else capacity)
    blocks: dict[tuple[int, int], list[MemoryBlock]] = {}
    events = [*events]
    try:
        for size, stream in events:
            if size > 0:
                blocks.setdefault((size, stream), []).append(allocator.allocate(size, stream))
            else:
                allocator.free(blocks[-size, stream].pop())
    except DeviceFull:
        return reserved_peak(events)
    return allocator.reserved_peak


def reserved_by(plan: RunPlan, events: Iterable[tuple[int, int]]) -> int | None:
    """Return ``reserved_peak`` for the device of ``plan``; None on CPUs, which do not have this allocator."""
    if plan.cluster.device is not Device.cuda:
        return None
    capacity = None if plan.cluster.gpu is None else find_gpu(plan.cluster.gpu).usable_bytes
    return reserved_peak(events, expandable=is_expandable(), capacity=capacity)


def is_expandable(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment sets expandable_segments (torch: AcceleratorAllocatorConfig::instance)."""
    options = env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    chosen = re.findall(r"expandable_segments\s*:\s*(\w+)", options)
    return bool(chosen) and chosen[-1] == "True"
