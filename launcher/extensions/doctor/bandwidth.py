"""Bandwidth worker: checks that torch starts, tries the GPUs that it sees, and measures collectives.

    python -m launcher.extensions.doctor.bandwidth WORKER_AS_JSON RESULT_FILE

It is a separate process, like a worker of a run, because a library may abort the process. All-gathers and
reduce-scatters are those with which training shards a model.
"""
# pyright: reportUnknownMemberType=false
# some arguments of torch.distributed have no type

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.config.schema import StrategyKind
from launcher.plan.sync_policy import Collective, Layout
from launcher.process import die_with_parent, exit_without_teardown
from launcher.rundir.files import last_lines, read_json, write_json

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


KINDS = (Collective.all_reduce, Collective.all_gather, Collective.reduce_scatter)
# payload sizes in bytes: each is _FACTOR times the last one, as long as the next is expected to fit into _MEASURE_S,
# which each kind has in each shape of groups
_SMALLEST, _LARGEST, _FACTOR = 1024, 64 * 2**20, 4
# each size is repeated so often, and beyond the least number for so many seconds
_LEAST_TIMES, _MOST_TIMES, _REPEAT_S = 5, 20, 0.1
_MEASURE_S = 3.0
# until the last worker has imported torch, which takes minutes on many nodes that read it from one cold disk
_RENDEZVOUS_S = 120
_COLLECTIVE_S = 30
_WITHIN_S = 180
# side of the matrices whose product a GPU computes
_PRODUCT = 1024


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured collective.

    Attributes:
        payload_bytes: what one rank hands to it.
        ranks, hosts: size of the group: all on one host, or one on each host.
        groups: groups that ran at the same time and share the hosts' links; 1 inside a host.
        seconds: on the slowest rank.
    """

    kind: Collective
    payload_bytes: int
    ranks: int
    hosts: int
    groups: int
    seconds: float

    def work(self, *, gloo: bool) -> tuple[int, float]:
        """Return the steps in a row, and the bytes that a rank sends inside its host, or the link of a host carries.

        A ring of W ranks passes an all-gather or a reduce-scatter on in W-1 steps, in which each rank sends (W-1)/W of
        the payload; an all-reduce is both (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009). On CPUs the launcher itself runs all-gathers and reduce-scatters: each rank sends every
        other rank its part at once (train/parallel/collectives.py).
        """
        passes = 2 if self.kind is Collective.all_reduce else 1
        steps = 1 if gloo and passes == 1 else passes * (self.ranks - 1)
        return steps, passes * self.groups * self.payload_bytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Worker:
    """One measuring worker; with ``world`` 1 it only inspects torch.

    Args:
        rank: ranks are numbered host by host.
        local: index of the worker on this host, and of its GPU.
        workers: workers on each host.
        store: HOST:PORT of the workers' rendezvous.
        device: cpu or cuda.
        parent: process id of the process that starts it.
    """

    rank: int
    world: int
    local: int
    workers: int
    store: str
    device: str
    parent: int


def measure(workers: Sequence[Worker], env: dict[str, str]) -> dict[str, Any]:
    """Run the workers of this host.

    Returns:
        Result of the first; if any failed, one with ``error``, the reason. ``tried``: the GPUs of all.
    """
    processes: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + _WITHIN_S
    with tempfile.TemporaryDirectory(prefix="launch-doctor-") as folder:
        files = [Path(folder) / str(worker.rank) for worker in workers]
        try:
            for worker, file in zip(workers, files, strict=True):
                fields = json.dumps(dataclasses.asdict(worker))
                command = [sys.executable, "-P", "-m", "launcher.extensions.doctor.bandwidth", fields, str(file)]
                with file.with_suffix(".err").open("wb") as errors:
                    # libraries log to standard output (NCCL_DEBUG=INFO)
                    processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors))
            results = [_result(*each, end) for each in zip(processes, files, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    tried = [gpu for result in results for gpu in result.get("tried", ())]
    return next((result for result in results if "error" in result), results[0]) | {"tried": tried}


def _result(process: subprocess.Popen[bytes], file: Path, end: float) -> dict[str, Any]:
    """Return what a worker has found, with ``error`` if it failed after that."""
    try:
        status = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return (read_json(file) or {}) | {"error": f"no result within {_WITHIN_S} s"}
    found = read_json(file)
    if status == 0:
        return found or {"error": "it ended without a result"}
    lines = [line.strip() for line in last_lines(file.with_suffix(".err"), 20) if line.strip()]
    return (found or {}) | {"error": lines[-1] if lines else f"it ended with status {status}"}


def main(fields: str, file: str) -> None:
    worker = Worker(**json.loads(fields))
    die_with_parent(worker.parent)

    found = inspect_torch(worker)
    write_json(Path(file), found)  # kept if a collective fails
    if worker.world > 1:
        write_json(Path(file), found | {"samples": [dataclasses.asdict(sample) for sample in _samples(worker)]})
    exit_without_teardown(0)


def inspect_torch(worker: Worker) -> dict[str, Any]:
    """Return the facts of torch, and what this worker's GPU computes; a worker alone tries all GPUs.

    Returns:
        ``cuda``: version for which torch is built, None for a CPU build. ``driver``: newest version that the driver
        knows, as 1000 * major + 10 * minor; 0 without a driver. ``tried``: ``index``, ``name``, ``error`` and
        ``problem`` of each GPU: the relative error of a product of matrices, None with the reason in ``problem`` if no
        kernel ran.
    """
    import torch

    cuda = worker.device == "cuda"
    gpus = torch.cuda.device_count()
    own = range(gpus) if worker.world == 1 else [worker.local] if worker.local < gpus else []
    return {
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "driver": cast("Any", torch)._C._cuda_getDriverVersion() if torch.version.cuda else 0,
        "nccl": ".".join(map(str, cast("Any", torch.cuda).nccl.version())) if cuda and torch.version.cuda else None,
        "tried": [_try_gpu(index) for index in own] if cuda else [],
        "samples": [],
    }


def _try_gpu(index: int) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"index": index, "name": "", "error": None, "problem": ""}
    try:
        found["name"] = torch.cuda.get_device_name(index)
        # older GPUs have no units for bf16
        narrow = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        error = product_error(torch.device("cuda", index), narrow)
        found |= {"error": error} if math.isfinite(error) else {"problem": "its products are not finite"}
    except Exception as error:  # the driver, a kernel, or memory; judged with the GPU's name
        found["problem"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return found


def product_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of a product of two matrices on ``device``, relative to the CPU's largest element."""
    import torch

    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_PRODUCT, _PRODUCT, generator=draws).to(dtype) for _ in range(2))
    exact = left.float() @ right.float()
    computed = (left.to(device) @ right.to(device)).float().cpu()
    return ((computed - exact).abs().max() / exact.abs().max()).item()


def _samples(worker: Worker) -> list[Sample]:
    """Return the measured collectives: of each kind, in each shape of groups, in several sizes."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    cuda = worker.device == "cuda"
    device = torch.device("cuda", worker.local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    host, _, port = worker.store.rpartition(":")
    store = TCPStore(host, int(port), worker.world, worker.rank == 0, timedelta(seconds=_RENDEZVOUS_S))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=worker.rank, world_size=worker.world,
        timeout=timedelta(seconds=_COLLECTIVE_S),
    )  # fmt: skip
    samples: list[Sample] = []
    for groups in group_shapes(worker.world // worker.workers, worker.workers):
        ranks = len(groups[0])
        hosts = len({rank // worker.workers for rank in groups[0]})
        sharing = worker.workers if hosts > 1 else 1
        group = _own_group(groups)
        for kind in KINDS:
            collective = _collective(kind, group, device)
            samples += [
                Sample(kind=kind, payload_bytes=size, ranks=ranks, hosts=hosts, groups=sharing, seconds=seconds)
                for size, seconds in _times(collective, ranks, device)
            ]
    dist.barrier()
    dist.destroy_process_group()
    return samples


def group_shapes(hosts: int, workers: int) -> list[list[list[int]]]:
    """Return the ranks of the groups that run at the same time, for each shape: the workers of each host, and one
    worker of each host."""
    world = hosts * workers
    shapes: list[list[list[int]]] = []
    if workers > 1:
        shapes.append([list(range(first, first + workers)) for first in range(0, world, workers)])
    if hosts > 1:
        shapes.append([list(range(local, world, workers)) for local in range(workers)])
    return shapes


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    import torch.distributed as dist

    made = [dist.new_group(ranks) for ranks in groups]  # every rank takes part in making each of them
    own = next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
    assert isinstance(own, dist.ProcessGroup)  # another type only on ranks that are not in the group
    return own


def _collective(kind: Collective, group: dist.ProcessGroup, device: torch.device) -> Callable[[Tensor], None]:
    """Return the collective as training runs it; its argument is the whole payload."""
    import torch.distributed as dist

    if kind is Collective.all_reduce:

        def reduce(payload: Tensor) -> None:
            dist.all_reduce(payload, group=group)

        return reduce

    from launcher.train.measure.comm_meter import Meter
    from launcher.train.measure.noise_scale import LocalGradNorm
    from launcher.train.parallel.collectives import Gather, Scatter

    size, rank = group.size(), group.rank()
    meter = Meter(StrategyKind.fsdp, Layout.replicated(0, size), device)
    exchanges = device.type == "cpu"
    stalled: Callable[[int | None], None] | None = (lambda _: None) if exchanges else None
    gather, scatter = Gather(meter, stalled), Scatter(meter, LocalGradNorm(), stalled)

    def run(payload: Tensor) -> None:
        meter.open_window()  # otherwise it keeps all timers
        if kind is Collective.all_gather:
            work = gather(payload, payload.view(size, -1)[rank].clone(), group)
        else:
            work = scatter(payload.new_empty(len(payload) // size), payload, group, dist.ReduceOp.SUM)
        if work is not None:
            work.wait()

    return run


def _times(collective: Callable[[Tensor], None], ranks: int, device: torch.device) -> Iterator[tuple[int, float]]:
    """Yield payload sizes and the seconds of the collective on the slowest rank: the lower quartile of several times,
    because another process that has the machine for a moment only adds to some of them."""
    import torch
    import torch.distributed as dist

    started, size = time.monotonic(), _SMALLEST
    while size <= _LARGEST:
        payload = torch.zeros(-(-size // 4 // ranks) * ranks, device=device)  # a sum of zeros never overflows
        _seconds(collective, payload)  # the first call opens the connections
        times: list[float] = []  # equal on all ranks, which therefore repeat equally often
        while len(times) < _LEAST_TIMES or (len(times) < _MOST_TIMES and sum(times) < _REPEAT_S):
            times.append(_seconds(collective, payload))
        quartile = sorted(times)[len(times) // 4]
        yield payload.nbytes, quartile
        expected = quartile * _FACTOR * (_LEAST_TIMES + 1)
        left = torch.tensor([_MEASURE_S - (time.monotonic() - started) - expected])
        dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks continue, or none
        if left.item() < 0:
            break
        size *= _FACTOR


def _seconds(collective: Callable[[Tensor], None], payload: Tensor) -> float:
    """Return the seconds of one collective on the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    collective(payload)
    if payload.is_cuda:
        torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
