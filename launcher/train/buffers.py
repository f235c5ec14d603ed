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
    """The buffers of ``module``, wrapped already. By name: a forward pass may put new tensors in their place."""

    def __init__(self, module: nn.Module, world_size: int, device: torch.device) -> None:
        self._module, self._device, self._alone = module, device, world_size == 1
        self._still = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._changing: list[str] = []

    def watch(self) -> None:
        """See which of those that have not changed so far have changed now, on any rank. All ranks call it: after the
        first window, and before evaluations and checkpoints."""
        if not self._still:
            return
        now = dict(self._module.named_buffers())
        flags = [not torch.equal(now[name], before) for name, before in self._still.items()]
        changed = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        if not self._alone:
            dist.all_reduce(changed, dist.ReduceOp.MAX)
        found = [name for name, flag in zip(self._still, changed.tolist(), strict=True) if flag]
        self.know(found)

    @property
    def changing(self) -> list[str]:
        """Names of those that are known to change."""
        return list(self._changing)

    def know(self, names: list[str]) -> None:
        """Take it that these change. All ranks are told the same."""
        self._changing += names
        for name in names:
            del self._still[name]

    @torch.no_grad()
    def share(self, meter: Meter) -> None:
        """Give every rank what rank 0 has, all of one format at once."""
        if self._alone:
            return
        now = dict(self._module.named_buffers())
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in self._changing:
            by_dtype.setdefault(now[name].dtype, []).append(now[name])
        for buffers in by_dtype.values():
            together = torch.cat([buffer.flatten() for buffer in buffers])
            flight = meter.take_off()
            meter.count(Collective.broadcast, together.nbytes)
            with meter.waiting():
                dist.broadcast(together, 0)
            flight.land()
            for buffer, value in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))
