"""The window under way: its micro-batches are handed out one by one, each within its sync and number format."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.config import Sync
from launcher.errors import EngineMisuse
from launcher.progress import PULSE, Phase
from launcher.train import step
from launcher.train.buffers import Buffers
from launcher.train.calibration import Kept, Rehearsal
from launcher.train.feed import Window
from launcher.train.loader import MicroBatch
from launcher.train.norm import Norms
from launcher.train.parallel import Parallel
from launcher.train.precision import Precision
from launcher.train.update import Update
from launcher.train.window_norm import OverWindow

Replay = Callable[[Callable[..., Any], Any], tuple[Tensor, int | Tensor]]


class UnderWay:
    """Where this rank stands in its window.

    Args:
        window: None between two windows.
        micro: the micro-batch whose backward pass has not come yet.
        last: whether it is the window's last on this rank, its boundary.
        rehearsing: whether it only takes time, and counts for nothing.
        sync: the window's policy.
        replay: runs a micro-batch again: (model, batch) -> what goes into the backward pass.
        started, work_began: when the window, and its first micro-batch, did, by ``time.perf_counter``.
        data_s: seconds waited for data; rehearsed_s: what the rehearsal took on the slowest rank, if there was one.
    """

    def __init__(
        self,
        parallel: Parallel,
        precision: Precision,
        norms: Norms,
        buffers: Buffers,
        update: Update,
        device: torch.device,
    ) -> None:
        self._parallel, self._precision, self._norms = parallel, precision, norms
        self._buffers, self._update, self._device = buffers, update, device
        self.window: Window | None = None
        self.micro: MicroBatch | None = None
        self.last = self.rehearsing = False
        self.replay: Replay | None = None

    def open(self, window: Window, sync: Sync, *, rehearses: bool, may_abandon: bool) -> Iterator[Any]:
        """Begin a window; its micro-batches' data, each to be followed by ``take``."""
        self.window, self.sync = window, sync
        self.rehearsed_s: float | None = None
        self.data_s = 0.0
        self._kept = Kept(self._parallel.module, self._device) if may_abandon else None
        self._start()
        self._batches = self._hand_out_all(window, rehearses)
        return self._batches

    def _start(self) -> None:
        self.started = time.perf_counter()
        self._parallel.meter.open_window()
        self._buffers.share(self._parallel.meter)

    def take(self) -> MicroBatch:
        """The micro-batch under way, whose loss has come."""
        if self.micro is None:
            raise EngineMisuse("engine.backward() belongs once into each micro-batch of `for batch in window`.")
        micro, self.micro = self.micro, None
        return micro

    def close(self) -> None:
        self.window = None

    def abandon(self) -> None:
        """Let nothing of the window stay: it is run again."""
        assert self._kept is not None
        self.micro = None
        self._batches.close()
        self._parallel.abandon()
        self._kept.put_back()
        self.close()

    def _hand_out_all(self, window: Window, rehearses: bool) -> Generator[Any, None, None]:
        micro_batches = window.micro_batches
        if rehearses:
            ahead = list(micro_batches)
            yield from self._rehearse(ahead)
            micro_batches = iter(ahead)
        if isinstance(self._norms, OverWindow):
            asked, ahead = time.perf_counter(), list(micro_batches)
            self.data_s += time.perf_counter() - asked
            self._norms.look_ahead(ahead, self._replayed)
            micro_batches = iter(ahead)
        self.work_began = time.perf_counter()
        self._handed_out = 0
        for number in range(window.count):
            asked = time.perf_counter()
            PULSE.beat(Phase.data, number + 1)
            self.micro = next(micro_batches)
            self.data_s += time.perf_counter() - asked
            self.last = number == window.count - 1
            with self._parallel.micro_batch(self.sync, first=number == 0, last=self.last):
                yield from self._hand_out(self.micro)

    def _hand_out(self, micro: MicroBatch) -> Iterator[Any]:
        self._norms.micro_batch(counts=micro.samples > 0, rehearsal=self.rehearsing)
        # the user's forward and backward run inside this: DDP decides in forward whether to synchronise
        self._handed_out += 1
        PULSE.beat(Phase.computing, self._handed_out)
        with self._precision.autocast():
            yield micro.data
        if self.micro is not None:
            raise EngineMisuse("engine.backward(loss_sum, items) was not called for a micro-batch.")

    def _replayed(self, micro: MicroBatch) -> Tensor:
        """What would go into the backward pass of ``micro``; the wrapped model's collectives are left out."""
        assert self.replay is not None
        self.micro = micro
        with self._precision.autocast():
            loss_sum, items = self.replay(self._parallel.module, micro.data)
        step.require_sum(loss_sum, items)
        self.micro = None
        return self._precision.scaled(loss_sum * self._update.weight(items, micro.samples))

    def _rehearse(self, micro_batches: list[MicroBatch]) -> Iterator[Any]:
        """The window's forward and backward passes without any collective, for their time; nothing of them stays."""
        rehearsal = Rehearsal(self._parallel, self._device)
        self.rehearsing = True
        self._handed_out = 0
        with rehearsal.under_way():
            for micro in micro_batches:
                self.micro = dataclasses.replace(micro, samples=0)
                yield from self._hand_out(micro)
        self.rehearsing = False
        self.rehearsed_s = rehearsal.slowest_s()
        self._start()
