"""Bandwidth worker: finds out whether torch starts, which GPUs it sees, and how fast an all-reduce is.

    python -m launcher.doctor.bandwidth WORKER_AS_JSON

Prints one JSON object as the last line of its output. It is a separate process, as a worker is, because a library may
abort the process.
"""
# pyright: reportUnknownMemberType=false
# some arguments of torch.distributed have no type

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launcher.process import die_with_parent, leave

if TYPE_CHECKING:
    import torch


# payload sizes in bytes: each is _TIMES the last one, as long as the next is expected to fit into _MEASURE_S
_SMALLEST, _LARGEST, _TIMES = 256 * 1024, 256 * 2**20, 4
_REPETITIONS = 3
_MEASURE_S = 8.0
_MEET_WITHIN_S = 30
_WITHIN_S = 120


@dataclass(frozen=True)
class Worker:
    """One measuring worker; with ``world`` 1 it only inspects torch.

    Args:
        local: index of the worker's GPU on this host.
        store: HOST:PORT where the workers meet.
        device: cpu or cuda.
        parent: process id of the process that starts it.
    """

    rank: int
    world: int
    local: int
    store: str
    device: str
    parent: int


def measure(workers: Sequence[Worker], env: dict[str, str]) -> dict[str, Any]:
    """Run the workers of this host. Return the result of the first; if any failed, one with ``error``, the reason."""
    started: list[subprocess.Popen[str]] = []
    end = time.monotonic() + _WITHIN_S
    # read at the same time: a worker whose pipe is full blocks, and the others wait for it
    with ThreadPoolExecutor(len(workers)) as readers:
        try:
            for worker in workers:
                told = json.dumps(dataclasses.asdict(worker))
                command = [sys.executable, "-P", "-m", "launcher.doctor.bandwidth", told]
                pipe = subprocess.PIPE
                started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
            answers = [readers.submit(_said, process, end) for process in started]
            said = [answer.result() for answer in answers]
        finally:
            for process in started:
                process.kill()
                process.wait()
    return next((one for one in said if one.get("error")), said[0])


def _said(process: subprocess.Popen[str], end: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {_WITHIN_S} s"}
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    lines = [line for line in err.splitlines() if line.strip()]
    return {"error": lines[-1].strip() if lines else f"ended with status {process.returncode}"}


def main(told: str) -> None:
    worker = Worker(**json.loads(told))
    die_with_parent(worker.parent)
    # libraries log to standard output (NCCL_DEBUG=INFO), also after the result, which has the pipe for itself
    result = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "times": []}
    if worker.world > 1:
        found["times"] = _times(worker)
    os.write(result, json.dumps(found).encode())
    leave(0)


def _times(worker: Worker) -> list[list[float]]:
    """Return [bytes, median seconds of one all-reduce on the slowest rank] for each payload size."""
    import torch
    import torch.distributed as dist

    cuda = worker.device == "cuda"
    device = torch.device("cuda", worker.local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"tcp://{worker.store}", rank=worker.rank,
        world_size=worker.world, timeout=timedelta(seconds=_MEET_WITHIN_S),
    )  # fmt: skip
    found: list[list[float]] = []
    size, begun = _SMALLEST, time.monotonic()
    _once(torch.ones(16, device=device))  # the first all-reduce opens the connections
    while size <= _LARGEST:
        data = torch.ones(size // 4, device=device)
        _once(data)
        times = sorted(_once(data) for _ in range(_REPETITIONS))
        found.append([size, times[len(times) // 2]])
        expected = times[-1] * _TIMES * (_REPETITIONS + 1)
        left = torch.tensor([_MEASURE_S - (time.monotonic() - begun) - expected])
        dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks continue, or none
        if left.item() < 0:
            break
        size *= _TIMES
    dist.barrier()
    dist.destroy_process_group()
    return found


def _once(data: torch.Tensor) -> float:
    """Return the seconds of one all-reduce on the slowest rank. Taking the maximum keeps ``data`` unchanged."""
    import torch
    import torch.distributed as dist

    begun = time.perf_counter()
    dist.all_reduce(data, dist.ReduceOp.MAX)
    if data.is_cuda:
        torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


if __name__ == "__main__":
    main(sys.argv[1])
