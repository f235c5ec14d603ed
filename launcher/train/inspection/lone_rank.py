"""Process group of a rank whose peers do not exist: it computes and holds what a rank of the whole job does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.train.measure.comm_meter import Timer
from launcher.train.parallel.collectives import Exchanger, ExchangeWork


class _OwnData(dist.Work):
    """Completed all-reduce of a rank that is alone in its group."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def _own_sum(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _OwnData | None:  # noqa: ARG001
    return _OwnData(tensor) if async_op else None


def _own_objects(objects: list[Any], value: Any, group: Any = None) -> None:  # noqa: ARG001
    objects[:] = [value] * len(objects)


def _own_parts(
    exchanger: Exchanger, received: Tensor, sent: Tensor, group: dist.ProcessGroup, timer: Timer
) -> ExchangeWork:
    """Receive what this rank sends. torch's own stand-in for a process group does the same in other collectives."""
    own = group.rank()
    received[:own].copy_(sent[:own])
    received[own + 1 :].copy_(sent[own + 1 :])
    timer.stop()
    done: Future[None] = Future()
    done.set_result(None)
    return ExchangeWork(done, exchanger.meter)


@contextmanager
def alone_in_group(world_size: int) -> Iterator[None]:
    """Context in which this process is rank 0 of a process group of ``world_size`` ranks, the others of which do not
    exist: every collective gives it its own data."""
    with (
        patch.object(dist, "all_reduce", _own_sum),
        patch.object(dist, "all_gather_object", _own_objects),
        patch.object(Exchanger, "start", _own_parts),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        yield
