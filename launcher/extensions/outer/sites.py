"""Sites of a job: groups of ranks that take optimizer steps on their own. Each rank is connected to the ranks of the
same number at the other sites, by gloo through host memory; within a site the default process group is used."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import SiteError
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.plan.run_plan import RunPlan
from launcher.rundir.paths import RunPaths
from launcher.train.world import Everyone, World, job_store, patience

T = TypeVar("T")
# Windows between a site's request to stop or to save and its effect at all sites. The exchange completes meanwhile, so
# that no site waits for it.
FLAGS_DELAY = 2


def own_site(plan: RunPlan) -> tuple[World, RunPlan]:
    """Return the world of this process, and the plan of its site: its share of each window, and a directory of its own;
    that of the first site is the run's. The plan of a site is returned as it is."""
    world = World.here(1 if plan.outer is None else plan.outer.sites)
    if world.sites == 1 or plan.batch.sites > 1:
        return world, plan
    directory = str(RunPaths(Path(plan.run.dir)).site(world.site))
    run = dataclasses.replace(plan.run, dir=directory)
    return world, dataclasses.replace(plan, run=run, batch=plan.batch.of_site(world.sites))


@functools.cache
def _group(world: World, timeout_s: float | None) -> Any:
    """Return the process group of the ranks with this number at all sites, which is created once in a process."""
    store = dist.PrefixStore(f"between_sites/{timeout_s}/{world.rank}", job_store(world))
    timeout = patience(timeout_s)
    arguments = () if timeout is None else (timeout,)
    return dist.ProcessGroupGloo(store, world.site, world.sites, *arguments)  # pyright: ignore


class Gathering:
    """Tensors of all sites that are under way."""

    def __init__(self, tensors: list[Tensor], work: Any) -> None:
        self._tensors, self._work = tensors, work

    def wait(self) -> list[Tensor]:
        """Wait for the tensors of all sites, and return them by site."""
        try:
            with HEARTBEAT.waiting_for(Wait.collective):
                self._work.wait()
        except RuntimeError as error:
            raise SiteError(
                f"The exchange with the other sites failed: {error}.\n  See the logs of their ranks."
            ) from None
        return self._tensors


@dataclasses.dataclass(frozen=True)
class _WholeJob:
    """All ranks of all sites, to compare what they have."""

    rank: int
    size: int
    between: Sites
    within: World

    def of_all(self, value: T) -> list[T]:
        return [each for site in self.between.of_all(self.within.of_all(value)) for each in site]


class Sites:
    """The sites of a job, seen from this rank. All ranks of all sites call each method, in the same order.

    Attributes:
        site, count: number of this site, and of all.
        rounds: outer steps of a fragment so far.
        total_seconds: time that this process has spent on outer steps.
        synchronous_s: time of an exchange of the gradient between the sites, without overlap; None: not measured.
        joined: this site did not exist when the checkpoint was saved, and has loaded the first site's.
    """

    def __init__(self, world: World, hang_timeout_s: float | None = None) -> None:
        self.site, self.count = world.site, world.sites
        self._group = _group(world, hang_timeout_s) if world.sites > 1 else None
        self._flags = deque[tuple[Tensor, Any]]()
        self._agreed: tuple[int, tuple[bool, bool]] = (-1, (False, False))
        self._saved_until = -1
        self._world, self._size, self.joined = world, world.size, False
        self.rounds, self.total_seconds = 0, 0.0
        self.synchronous_s: float | None = None
        self._seconds, self._payload_bytes = 0.0, 0  # since the last record

    def gather(self, tensor: Tensor) -> Gathering:
        """Start to gather a tensor in host memory, of one shape at all sites."""
        assert self._group is not None
        self._payload_bytes += tensor.nbytes
        everyone = [torch.empty_like(tensor) for _ in range(self.count)]
        return Gathering(everyone, self._group.allgather([everyone], [tensor.contiguous()]))

    def of_all(self, value: T) -> list[T]:
        """Return the ``value`` of every site, by site. Values are pickled."""
        if self.count == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor([len(data)])).wait()]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        everyone = self.gather(padded).wait()
        return [pickle.loads(each[:n].numpy().tobytes()) for each, n in zip(everyone, lengths, strict=True)]

    def whole_job(self) -> Everyone:
        """Return all ranks of all sites."""
        return self._world if self.count == 1 else _WholeJob(*self._world.in_job, self, self._world)

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every site the first site's values, in place. Only tensors that differ are sent."""
        if self.count == 1:
            return
        everyone = self.of_all([digest_of(tensor) for tensor in tensors])
        for tensor, *digests in zip(tensors, *everyone, strict=True):
            if len(set(digests)) > 1:
                tensor.copy_(self.gather(tensor.detach().cpu()).wait()[0])

    def agree(self, window: int, *, stop: bool, save_due: bool) -> tuple[bool, bool]:
        """Return whether all sites stop after this window, and save: what any site requested FLAGS_DELAY windows ago.
        A window that runs again gets the same answer."""
        if self.count == 1:
            return stop, save_due
        if self._agreed[0] != window:
            self._agreed = window, self._exchange(window, stop=stop, save_due=save_due)
        return self._agreed[1]

    def _exchange(self, window: int, *, stop: bool, save_due: bool) -> tuple[bool, bool]:
        assert self._group is not None
        flags = torch.tensor([stop, save_due], dtype=torch.int32)
        self._payload_bytes += flags.nbytes
        self._flags.append((flags, self._group.allreduce([flags], dist.ReduceOp.MAX)))
        if len(self._flags) <= FLAGS_DELAY:
            return False, False
        earlier, work = self._flags.popleft()
        Gathering([], work).wait()
        # the clock that requested a save is only reset by that save: until then it has requested more of them
        saves = bool(earlier[1]) and window > self._saved_until
        if saves:
            self._saved_until = window + FLAGS_DELAY
        return bool(earlier[0]), saves

    def measure(self, size: int, limit_s: float) -> None:
        """Measure how long the sites would take to sum a gradient in each step, as a synchronous job does.

        An all-reduce is repeated with twice as many bytes each time, up to ``size``. If there is no time for all of
        them, what the largest one takes longer than the smallest one is scaled.

        Args:
            size: bytes of fp32 gradients that this rank would sum.
            limit_s: seconds after which no larger one follows.
        """
        assert self._group is not None
        n, began, payload_bytes = min(size, 1 << 14), time.perf_counter(), self._payload_bytes
        seconds: list[float] = []
        while True:
            tensor, started = torch.zeros(max(1, n // 4)), time.perf_counter()
            self._group.allreduce([tensor], dist.ReduceOp.SUM).wait()
            seconds.append(max(self.of_all(time.perf_counter() - started)))
            elapsed = max(self.of_all(time.perf_counter() - began))
            if n == size or elapsed + 2 * seconds[-1] > limit_s:
                break
            n = min(size, 2 * n)
        longer = max(0.0, seconds[-1] - seconds[0])
        self.synchronous_s = seconds[0] + longer * size / n
        self._payload_bytes = payload_bytes

    def add_time(self, seconds: float) -> None:
        """Add the time that an outer step has taken."""
        self._seconds += seconds
        self.total_seconds += seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this site since the last call; none for a job of one site. Each of its ranks sends as
        much as this one."""
        if self.count == 1:
            return {}
        values = {
            "outer/sites": self.count,
            "outer/rounds": self.rounds,
            "outer/payload_bytes": self._payload_bytes * self._size,
            "outer/wire_bytes": self._payload_bytes * self._size * (self.count - 1),
            "outer/time_s": self._seconds,
        }
        self._seconds, self._payload_bytes = 0.0, 0
        return values | self.totals()

    def totals(self) -> dict[str, float]:
        """Return metrics of the whole run beside the number of rounds and their time."""
        return {} if self.synchronous_s is None else {"outer/synchronous_s": self.synchronous_s}

    def leave(self) -> None:
        """Wait until no other site needs an answer from this one."""
        while self._flags:
            Gathering([], self._flags.popleft()[1]).wait()
        self.of_all(None)


def digest_of(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bits."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).digest()
