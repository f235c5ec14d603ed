"""Reading of whole feeds, shared by the tests of windows, streams and data order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.rundir.files import value_from_json
from launcher.train.data.loader import Collate
from launcher.train.data.stream import StreamCheckpoint
from launcher.train.data.window_feed import BEGINNING, WindowPosition, open_feed
from launcher.train.inspection.task_probe import probe
from launcher.train.world import World
from tests.helpers import inspection_of, make_plan

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
    """All windows of all ranks from ``start`` on, of the epochs or steps of the plan."""
    limit = plan.train.steps - start.index if plan.train.epochs is None else 100
    return run_resumably(plan, lambda _: dataset, start, windows=limit)[0]


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
    """All windows of all ranks, merged as the ranks would run them together: the samples that count, sorted.

    Args:
        make: the data of a rank.
        windows: the most that are read; fewer if the plan's epochs end.
    """
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
    while len(merged) < windows and (plan.train.epochs is None or place.epoch < plan.train.epochs):
        current = [next(stream) for stream in streams]
        assert len({window.count for window in current}) == 1, "all ranks run the same number of micro-batches"
        members: list[int] = []
        for window in current:
            batches = list(window.micro_batches)
            assert len(batches) == window.count
            for batch in batches:
                assert len(batch.data) >= 1, "a stand-in still carries data"
                members += batch.data.tolist()[: batch.samples]
        merged.append(sorted(members))
        # as a window's collective does: all ranks have data as long as one of them does
        more = any(feed.has_next() for feed in feeds)
        (place,) = {feed.advance(more) for feed in feeds}
    states = [checkpoint.state_dict() for checkpoint in checkpoints]
    for feed in feeds:
        feed.close()
    return merged, place, states


def plan_for(micro: int, ranks: int, *overrides: str, samples: int | None = 103) -> RunPlan:
    return make_plan(
        "batch.global_size=24", f"batch.micro_size={micro}", f"cluster.workers_per_node={ranks}",
        "train.loader_workers=0", *overrides, samples=samples,
    )  # fmt: skip


def planned(name: str, *options: str, **params: Any) -> TaskPlan:
    """The task of order_tasks.py as it is described to the plan, which is then solved."""
    fields = probe(inspection_of(f"tests.train.data.order_tasks.{name}", *options, **params))
    task = value_from_json(TaskPlan, fields)
    make_plan(*options, task=task)
    return task
