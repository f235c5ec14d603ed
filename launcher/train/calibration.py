"""Measures what the sync policy gains and what communication still costs, on early windows of the job itself.

Three kinds of windows compare: with sync=every, with the job's own policy, and a rehearsal without any collective. The
first two sum the same gradients, so they train like any other window. A rehearsal runs the micro-batches of the window
that follows it; its gradients are thrown away, and random state and buffers are put back.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from launcher.config import Compress, Sync
from launcher.errors import PolicyNotObserved
from launcher.plan import RunPlan
from launcher.train.randomness import random_state, restore_random_state

if TYPE_CHECKING:
    from launcher.train.parallel import Parallel

# DDP lays its buckets out anew after the first synchronised backward pass: neither it nor its successor is typical
WARM_UP_WINDOWS = 2


@dataclass(frozen=True)
class Calibrated:
    """Medians over the calibration's windows, in seconds.

    Args:
        step_s: a step with the job's own policy.
        step_s_every: with every micro-batch synchronised; None where the job's policy is that one.
        exposed_s: what the same micro-batches took longer with the policy's collectives than without any; None where
            none was rehearsed.
        comm_s: time of ``step_s`` in which a collective was under way.
    """

    step_s: float
    step_s_every: float | None
    exposed_s: float | None
    comm_s: float

    @property
    def speedup(self) -> float | None:
        return None if self.step_s_every is None else self.step_s_every / self.step_s

    @property
    def overlap(self) -> float | None:
        """The part of the communication that was hidden behind computation, 0 to 1."""
        if self.exposed_s is None:
            return None
        return min(1.0, max(0.0, 1 - self.exposed_s / self.comm_s)) if self.comm_s else 0.0


@dataclass(frozen=True)
class WindowTimes:
    """Of one window, in seconds: ``step_s`` in all; ``work_s`` from the first micro-batch to the gradients;
    ``rehearsed_s``, the same without a collective, where it was rehearsed; ``comm_s``: collectives under way."""

    step_s: float
    work_s: float
    comm_s: float
    rehearsed_s: float | None


@dataclass
class Calibration:
    """Which policy each early window runs with, and what came of it.

    Args:
        own: the job's policy.
        windows: how many of each kind; 0 to leave it out.
        alternates: whether ``own`` differs from syncing every micro-batch here.
        may_rehearse: whether there is room for the whole model.
    """

    own: Sync
    windows: int
    alternates: bool
    may_rehearse: bool = True
    start: int = WARM_UP_WINDOWS
    _every_s: list[float] = field(default_factory=list[float])
    _own: list[WindowTimes] = field(default_factory=list[WindowTimes])

    @classmethod
    def of(cls, plan: RunPlan, begin: int = 0) -> Self:
        """``begin``: the first window that runs as the plan says."""
        strategy = plan.strategy
        return cls(
            strategy.sync,
            plan.train.calibrate if plan.batch.world_size > 1 else 0,
            alternates=strategy.sync is not Sync.every
            and plan.batch.accumulation > 1
            # what PowerSGD leaves out depends on how often it is asked: only its own policy trains as the job does
            and strategy.compress is not Compress.powersgd,
            may_rehearse=strategy.rehearses,
            # what is measured is a step of the global batch itself
            start=WARM_UP_WINDOWS + max(begin, sum(stage.windows for stage in plan.batch.ramp)),
        )

    @property
    def _stop(self) -> int:
        return self.start + self.windows * (2 if self.alternates else 1)

    def sync(self, window: int) -> Sync:
        """The policy of a window, counted over the whole run: policies round differently, so a run that is resumed
        must use the one that it would have used."""
        in_turn = self.alternates and self.start <= window < self._stop and (window - self.start) % 2 == 0
        return Sync.every if in_turn else self.own

    def rehearses(self, window: int) -> bool:
        """Whether the micro-batches of this window are first run without any collective."""
        in_turn = self.start <= window < self._stop and (not self.alternates or (window - self.start) % 2 == 1)
        return in_turn and self.may_rehearse

    def observe(self, window: int, times: WindowTimes, typical: bool) -> Calibrated | None:
        """Take a window's times in, unless they are not ``typical``: of a short window, or just after a start. The
        result, once, after the last of them."""
        if not self.start <= window < self._stop:
            return None
        if typical:
            if self.alternates and self.sync(window) is Sync.every:
                self._every_s.append(times.step_s)
            else:
                self._own.append(times)
        return self.result() if window == self._stop - 1 else None

    def result_before(self, window: int) -> Calibrated | None:
        """The result, if that was known before this window."""
        return self.result() if window >= self._stop else None

    def state_dict(self) -> dict[str, Any]:
        """The times so far, as JSON has them."""
        return {
            "start": self.start,
            "every_s": self._every_s,
            "own": [dataclasses.asdict(times) for times in self._own],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state.get("start", self.start)
        self._every_s = list(state["every_s"])
        self._own = [WindowTimes(**times) for times in state["own"]]

    def result(self) -> Calibrated | None:
        if not self._own or (self.alternates and not self._every_s):
            return None
        exposed = [times.work_s - times.rehearsed_s for times in self._own if times.rehearsed_s is not None]
        return Calibrated(
            step_s=statistics.median(times.step_s for times in self._own),
            step_s_every=statistics.median(self._every_s) if self._every_s else None,
            exposed_s=statistics.median(exposed) if exposed else None,
            comm_s=statistics.median(times.comm_s for times in self._own),
        )


def measured_as(plan: RunPlan) -> dict[str, Any]:
    """What a step's time and traffic depend on, as JSON has it: figures of two plans that differ in it do not mix."""
    left_out = ("forecasts", "sync_reason", "memory_bytes")  # said of the policy, and no part of it
    strategy = {name: value for name, value in dataclasses.asdict(plan.strategy).items() if name not in left_out}
    return {
        "nodes": plan.cluster.nodes,
        "workers_per_node": plan.cluster.workers_per_node,
        "device": plan.cluster.device,
        "global_size": plan.batch.global_size,
        "micro_size": plan.batch.micro_size,
        "norm": plan.batch.norm,
        "strategy": strategy,
        "precision": dataclasses.asdict(plan.precision),
        "compile": plan.train.compile,
        "calibrate": plan.train.calibrate,
    }


class Rehearsal:
    """One window's forward and backward passes without any collective; nothing but their time stays."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self._parallel, self._device = parallel, device
        self._took = 0.0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around the passes.

        Raises:
            PolicyNotObserved: they have run a collective.
        """
        kept = Kept(self._parallel.module, self._device)
        with self._parallel.rehearsal():
            self._parallel.meter.open_window()
            began = self._now()
            yield
            self._took = self._now() - began
            if not self._parallel.meter.silent:
                raise PolicyNotObserved("A rehearsal without communication has run collectives.")
        kept.put_back()

    def slowest_s(self) -> float:
        """Seconds that the slowest rank took: in a window of its own every rank waits for that one. All call it."""
        slowest = torch.tensor([self._took], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def _now(self) -> float:
        """The clock, once the device is through with what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Kept:
    """What a rehearsal must leave as it was: random state, and the buffers that forward passes change."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device, self._random = device, random_state(device)
        # by name: a forward pass may put a new tensor in a buffer's place
        self._module = module
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    @torch.no_grad()
    def put_back(self) -> None:
        restore_random_state(self._random, self._device)
        for name, buffer in self._module.named_buffers():
            buffer.copy_(self._buffers[name])
