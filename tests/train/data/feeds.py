"""Reading of whole feeds, shared by the tests of windows, streams and data order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from launcher.plan.run_plan import RunPlan
from launcher.train.data.loader import Collate
from launcher.train.data.stream import StreamCheckpoint
from launcher.train.data.window_feed import BEGINNING, Feed, WindowPosition, open_feed
from launcher.train.world import World
from tests.helpers import make_plan

CPU = torch.device("cpu")


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def read(plan: RunPlan, dataset: Any, start: WindowPosition = BEGINNING) -> list[list[int]]:
    """All windows of all ranks, merged as the ranks would run them together: the samples that count, sorted."""
    size = plan.batch.world_size
    feeds = [open_feed(dataset, plan, World(rank, size, rank), CPU, start=start) for rank in range(size)]
    streams = [feed.windows() for feed in feeds]
    merged: list[list[int]] = []
    limit = plan.train.steps if plan.train.epochs is None else None
    while limit is None or len(merged) < limit - start.index:
        windows = [next(stream, None) for stream in streams]
        if None in windows:
            assert windows == [None] * size, "the ranks must end together"
            break
        assert len({window.count for window in windows if window}) == 1, (
            "all ranks run the same number of micro-batches"
        )
        members: list[int] = []
        for window in windows:
            assert window is not None
            batches = list(window.micro_batches)
            assert len(batches) == window.count
            for batch in batches:
                assert len(batch.data) >= 1, "a stand-in still carries data"
                members += batch.data.tolist()[: batch.samples]
        merged.append(sorted(members))
        if over(plan, advance(feeds)):
            break
    for feed in feeds:
        feed.close()
    return merged


# windows, the position after them, and by rank the states that a checkpoint has
Resumable = tuple[list[list[int]], WindowPosition, list[dict[str, Tensor]]]


def run_resumably(
    plan: RunPlan,
    make: Callable[[int], Any],
    start: WindowPosition = BEGINNING,
    saved: Sequence[dict[str, Tensor]] = (),
    windows: int = 100,
    collate: Collate | None = None,
) -> Resumable:
    """The windows of all ranks from ``start`` on, until two epochs are over. ``make``: the data of a rank."""
    size = plan.batch.world_size
    checkpoints = [StreamCheckpoint() for _ in range(size)]
    for checkpoint in checkpoints:
        checkpoint.load_state_dict(saved)
    feeds = [
        open_feed(make(rank), plan, World(rank, size, rank), CPU, collate, start, checkpoint=checkpoints[rank])
        for rank in range(size)
    ]
    streams = [feed.windows() for feed in feeds]
    merged, place = list[list[int]](), start
    while len(merged) < windows and place.epoch < 2:
        members: list[int] = []
        for stream in streams:
            for batch in next(stream).micro_batches:
                members += batch.data.tolist()[: batch.samples]
        merged.append(sorted(members))
        place = advance(feeds)
    states = [checkpoint.state_dict() for checkpoint in checkpoints]
    for feed in feeds:
        feed.close()
    return merged, place, states


def advance(feeds: list[Feed]) -> WindowPosition:
    """Advance all feeds as a window's collective does, and return the position of the next window. They all have data
    as long as one of them does."""
    more = any(feed.has_next() for feed in feeds)
    places = {feed.advance(more) for feed in feeds}
    assert len(places) == 1, "the ranks must end together"
    return places.pop()


def over(plan: RunPlan, place: WindowPosition) -> bool:
    return plan.train.epochs is not None and place.epoch >= plan.train.epochs


def plan_for(micro: int, ranks: int, *overrides: str, samples: int | None = 103) -> RunPlan:
    return make_plan(
        "batch.global_size=24", f"batch.micro_size={micro}", f"cluster.workers_per_node={ranks}",
        "train.loader_workers=0", *overrides, samples=samples,
    )  # fmt: skip
