"""A task that needs memory by the sample, on ranks that have little of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from launcher import Loss
from speech.tasks import Tagger

BYTES_A_SAMPLE = 1 << 30


class _Needs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, samples):
        ctx.samples = samples
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.samples * BYTES_A_SAMPLE, dtype=torch.uint8)
        return gradient, None


class Limited(Tagger):
    """``room``: samples for which rank ``rank`` has memory, from its ``after``-th micro-batch on. ``where``: forward or
    backward."""

    def __init__(self, room=1, rank=1, after=1, where="forward", **others):
        super().__init__(**others)
        self.room, self.rank, self.after, self.where = room, rank, after, where

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training and int(os.environ["RANK"]) == self.rank and self.calls >= self.after:
            self.limit()
            if self.where == "forward":
                torch.empty(len(batch) * BYTES_A_SAMPLE, dtype=torch.uint8)
            else:
                loss = Loss(_Needs.apply(loss.total, len(batch)), loss.items)
        return loss

    def limit(self):
        """The allocator's, by the address space that the kernel gives this process."""
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            with Path("/proc/self/statm").open() as file:
                taken = int(file.read().split()[0]) * resource.getpagesize()
            most = taken + self.room * BYTES_A_SAMPLE + BYTES_A_SAMPLE // 2
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
