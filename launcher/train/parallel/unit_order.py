"""Order in which the ranks call shard units, compared between them.

The n-th gather of one rank belongs to the n-th of the others. Ranks that call units in another order, more often or
not at all (towers that run in the order of the data, experts without tokens) would exchange parts of different units.
Each rank hashes its calls, and the window's own all-reduce compares the hashes. On CPUs, where the messages of
different units are not confused (collectives.py), such ranks may wait for each other instead: a rank that has waited
for some seconds publishes its calls in the process group's store, and reads those of the others that wait.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.measure.observer import Observer

_PRIME = 1_048_573  # its square, times 8,192 ranks, is a whole number in fp64
_DEADLOCK_S = 15.0  # all ranks of a group have waited for so long, each for the same message
_POLL_S = 1.0
_counts = itertools.count()  # engines are made in the same order on all ranks


class UnitOrder(Observer):
    """Observer of the calls of shard units.

    Args:
        units: the root, and the shard units.
        group: the ranks that share one copy of the model.

    Attributes:
        counts: calls count; not in passes without collectives, which may end early on one rank.
    """

    width = 2

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], kind: StrategyKind, group: dist.ProcessGroup
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[unit] or "the root" for unit in units]
        self._kind, self._group, self._number = kind, group, next(_counts)
        self.counts = True
        self._calls: list[int] = []  # of this window, without those of the root
        self._window = self._hash = 0
        self._waiting: tuple[list[Any], float] = ([], 0.0)  # what the ranks have published, and since when

    def called(self, unit: int) -> None:
        """Count a forward pass of a unit. ``unit``: position among the units."""
        # the root's parameters are gathered in each micro-batch, whether its forward pass runs or not
        if unit and self.counts:
            self._calls.append(unit)
            self._hash = (self._hash * 31 + unit) % _PRIME

    def begin_window(self) -> None:
        self._calls, self._hash = [], 0
        self._window += 1

    def contribution(self) -> Sequence[Tensor | float]:
        return [float(self._hash), float(self._hash) ** 2]

    def receive(self, sums: Sequence[float]) -> None:
        """Raise TaskError, on all ranks, if they have called units differently.

        By Cauchy and Schwarz, the square of the sum is W times the sum of squares only if all hashes are equal.
        """
        size = dist.get_world_size()
        if size * sums[1] != sums[0] ** 2:
            everyone = [self._calls] * size
            dist.all_gather_object(everyone, self._calls)
            if (text := self._difference(dict(enumerate(everyone)))) is not None:
                raise TaskError(text)

    def stalled(self, message: int | None) -> None:
        """Publish this rank's calls. It has waited for some seconds, and calls this every second from then on.

        Args:
            message: number of the exchange that it waits for; None: it waits no longer, and what it has published does
                not count any more.

        Raises:
            TaskError: the ranks of the group wait after different calls.
        """
        store: Any = dist.distributed_c10d._get_default_store()
        ranks: list[int] = dist.get_process_group_ranks(self._group)
        keys = {rank: f"unit_order/{self._number}/{self._window}/{rank}" for rank in ranks}
        store.set(keys[dist.get_rank()], json.dumps([message, self._calls]))
        if message is None or not all(store.check([key]) for key in keys.values()):  # a rank computes
            return
        published = [json.loads(store.get(key)) for key in keys.values()]
        if any(waited_for is None for waited_for, _ in published):
            self._waiting = [], 0.0
            return
        now = time.monotonic()
        if published != self._waiting[0]:
            self._waiting = published, now
        calls = dict(zip(ranks, (each for _, each in published), strict=True))
        shortest = min(map(len, calls.values()))
        deadlock = now - self._waiting[1] > _DEADLOCK_S
        diverged = any(each[:shortest] != calls[ranks[0]][:shortest] for each in calls.values())
        if (deadlock or diverged) and (text := self._difference(calls)) is not None:
            time.sleep(2 * _POLL_S)  # the others come to the same result before this process ends
            raise TaskError(text)

    def _difference(self, calls: Mapping[int, Sequence[int]]) -> str | None:
        """Return the message for the first call that differs between ranks; None if all are the same."""
        first = next(iter(calls))
        here = calls[first]
        rank = next((rank for rank, each in calls.items() if each != here), None)
        if rank is None:
            return None
        pairs = enumerate(itertools.zip_longest(here, calls[rank]))
        number, different = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        units = [self._names[unit] for unit in different if unit is not None]
        shown = ["no further one" if unit is None else self._names[unit] for unit in different]
        return (
            f"The ranks call different shard units: call {number + 1} of the window is {shown[0]} on rank {first}, "
            f"and {shown[1]} on rank {rank}. With strategy={self._kind.value}, all ranks must call each unit in the "
            "same order and equally often, whatever their samples are.\n"
            f"  Keep {' and '.join(units)} out of what the task's shard_units(model) returns, or return one unit "
            "around all such modules;\n  or call each in every micro-batch in the same order, with a loss of weight 0 "
            "where it is not needed; or use\n  strategy=ddp strategy.sync=every strategy.find_unused_parameters=true."
        )
