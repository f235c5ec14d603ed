"""Exchange between the sites of a job. Each rank is connected to the ranks of the same number at the other sites, by
gloo through host memory; within a site the default process group is used."""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import SiteError
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.train.parallel.replicas import checksum
from launcher.train.sites import OneSite
from launcher.train.world import World, job_store, patience

T = TypeVar("T")
Gathering = Callable[[], list[Tensor]]  # waits, and returns the tensors of all sites
# Windows between a site's request to stop or to save and its effect at all sites. The exchange completes meanwhile, so
# that no site waits for it.
FLAGS_DELAY = 2


@functools.cache
def _group(world: World, timeout_s: float | None) -> Any:
    """Return the process group of the ranks with this number at all sites, which is created once in a process."""
    store = dist.PrefixStore(f"between_sites/{timeout_s}/{world.rank}", job_store(world))
    timeout = patience(timeout_s)
    return dist.ProcessGroupGloo(store, world.site, world.sites, *([timeout] if timeout else []))  # pyright: ignore


def _finish(work: Any) -> None:
    """Wait for an exchange that was started."""
    try:
        with HEARTBEAT.waiting_for(Wait.collective):
            work.wait()
    except RuntimeError as error:
        raise SiteError(f"The exchange with the other sites failed: {error}.\n  See the logs of their ranks.") from None


class Sites(OneSite):
    """Several sites.

    Attributes:
        rounds: outer steps of a fragment so far.
        synchronous_s: time of an exchange of the gradient between the sites, without overlap; None: not measured.
    """

    def __init__(self, world: World, hang_timeout_s: float | None) -> None:
        super().__init__(world)
        self._group = _group(world, hang_timeout_s)
        self._flags = deque[tuple[Tensor, Any]]()
        self._agreed: tuple[int, tuple[bool, bool]] = (-1, (False, False))
        self._saved_until = -1
        self.rounds, self.synchronous_s = 0, None
        self._total_s = self._seconds = 0.0  # of outer steps in this process, and since the last record
        self._payload_bytes = 0  # since the last record

    def gather(self, tensor: Tensor) -> Gathering:
        """Start to gather a tensor in host memory, of one shape at all sites. The result waits for all of them."""
        self._payload_bytes += tensor.nbytes
        everyone = [torch.empty_like(tensor) for _ in range(self.count)]
        work = self._group.allgather([everyone], [tensor.contiguous()])

        def wait() -> list[Tensor]:
            _finish(work)
            return everyone

        return wait

    def of_all(self, value: T) -> list[T]:
        """Return the ``value`` of every site, by site. Values are pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor([len(data)]))()]
        everyone = self.gather(torch.nn.functional.pad(data, (0, max(lengths) - len(data))))()
        return [pickle.loads(each[:n].numpy().tobytes()) for each, n in zip(everyone, lengths, strict=True)]

    def differing(self, tensors: Iterable[Tensor]) -> list[bool]:
        """Return for each tensor whether this rank's part is another one at some site."""
        everyone = self.of_all([int(checksum(tensor)) for tensor in tensors])
        return [len(set(sums)) > 1 for sums in zip(*everyone, strict=True)]

    def agree(self, window: int, *, stop: bool, save_due: bool) -> tuple[bool, bool]:
        """Return whether all sites stop after this window, and save: what any site requested FLAGS_DELAY windows ago.
        A window that runs again gets the same answer."""
        if self._agreed[0] != window:
            self._agreed = window, self._exchange(window, torch.tensor([stop, save_due], dtype=torch.int32))
        return self._agreed[1]

    def _exchange(self, window: int, flags: Tensor) -> tuple[bool, bool]:
        self._payload_bytes += flags.nbytes
        self._flags.append((flags, self._group.allreduce([flags], dist.ReduceOp.MAX)))
        if len(self._flags) <= FLAGS_DELAY:
            return False, False
        earlier, work = self._flags.popleft()
        _finish(work)
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
        n, began, payload_bytes = min(size, 1 << 14), time.perf_counter(), self._payload_bytes
        seconds: list[float] = []
        while True:
            tensor, started = torch.zeros(max(1, n // 4)), time.perf_counter()
            _finish(self._group.allreduce([tensor], dist.ReduceOp.SUM))
            now = time.perf_counter()
            took, elapsed = map(max, zip(*self.of_all((now - started, now - began)), strict=True))
            seconds.append(took)
            if n == size or elapsed + 2 * took > limit_s:
                break
            n = min(size, 2 * n)
        self.synchronous_s = seconds[0] + max(0.0, seconds[-1] - seconds[0]) * size / n
        self._payload_bytes = payload_bytes

    def add_time(self, seconds: float) -> None:
        """Add the time that an outer step has taken."""
        self._seconds += seconds
        self._total_s += seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this site since the last call. Each of its ranks sends as much as this one."""
        payload_bytes, seconds = self._payload_bytes * self.world.size, self._seconds
        self._seconds, self._payload_bytes = 0.0, 0
        traffic = {"outer/payload_bytes": payload_bytes, "outer/wire_bytes": payload_bytes * (self.count - 1)}
        return {**self.summary(1), **traffic, "outer/time_s": seconds}

    def summary(self, windows: int) -> dict[str, float]:
        """Return the metrics of the whole run. ``windows``: number of those that this process has run."""
        measured = {} if self.synchronous_s is None else {"outer/synchronous_s": self.synchronous_s}
        seconds = self._total_s / max(1, windows)
        return {"outer/sites": self.count, "outer/rounds": self.rounds, "outer/time_s": seconds, **measured}

    def leave(self) -> None:
        while self._flags:
            _finish(self._flags.popleft()[1])
        self.of_all(None)
