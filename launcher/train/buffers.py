"""Buffers that training changes (a BatchNorm's statistics): rank 0's, at the start of each window, on every rank.

DDP does this in forward, for every buffer, changed or not; FSDP does not. Here it is one thing for all strategies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.policy import Collective
from launcher.train.meter import Meter


class Buffers:
    """The buffers of ``module``, wrapped already. Which of them change is seen in the first window."""

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self._all = list(module.buffers()) if world_size > 1 else []
        self._before: list[Tensor] | None = [buffer.detach().clone() for buffer in self._all]
        self._changing: list[Tensor] = []

    def watch(self) -> None:
        """Called at the end of each window; the first one shows which buffers change, on any rank."""
        if self._before is None:
            return
        pairs = zip(self._all, self._before, strict=True)
        changed = torch.tensor([not torch.equal(now, before) for now, before in pairs], dtype=torch.uint8)
        self._before = None
        if len(changed):
            dist.all_reduce(changed, dist.ReduceOp.MAX)
            self._changing = [buffer for buffer, flag in zip(self._all, changed.tolist(), strict=True) if flag]

    @torch.no_grad()
    def share(self, meter: Meter) -> None:
        """Give every rank what rank 0 has."""
        for buffer in self._changing:
            flight = meter.take_off()
            meter.count(Collective.broadcast, buffer.nbytes)
            dist.broadcast(buffer, 0)
            flight.land()
