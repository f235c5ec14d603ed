"""Bandwidth worker: checks that torch starts, counts the GPUs that it sees, and measures an all-reduce.

    python -m launcher.doctor.bandwidth WORKER_AS_JSON RESULT_FILE

It is a separate process, like a worker of a run, because a library may abort the process.
"""
# pyright: reportUnknownMemberType=false
# some arguments of torch.distributed have no type

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.process import die_with_parent, exit_without_teardown
from launcher.rundir.files import last_lines, read_json

if TYPE_CHECKING:
    import torch


# payload sizes in bytes: each is _FACTOR times the last one, as long as the next is expected to fit into _MEASURE_S
_SMALLEST, _LARGEST, _FACTOR = 256 * 1024, 256 * 2**20, 4
_REPETITIONS = 3
_MEASURE_S = 8.0
_RENDEZVOUS_S = 30
_WITHIN_S = 120


@dataclass(frozen=True)
class Worker:
    """One measuring worker; with ``world`` 1 it only inspects torch.

    Args:
        local: index of the worker's GPU on this host.
        store: HOST:PORT of the workers' rendezvous.
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
    processes: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + _WITHIN_S
    with tempfile.TemporaryDirectory(prefix="launch-doctor-") as folder:
        files = [Path(folder) / str(worker.rank) for worker in workers]
        try:
            for worker, file in zip(workers, files, strict=True):
                fields = json.dumps(dataclasses.asdict(worker))
                command = [sys.executable, "-P", "-m", "launcher.doctor.bandwidth", fields, str(file)]
                with file.with_suffix(".err").open("wb") as errors:
                    # libraries log to standard output (NCCL_DEBUG=INFO)
                    processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors))
            results = [_result(*each, end) for each in zip(processes, files, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return next((result for result in results if "error" in result), results[0])


def _result(process: subprocess.Popen[bytes], file: Path, end: float) -> dict[str, Any]:
    try:
        status = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {_WITHIN_S} s"}
    if status == 0:
        return read_json(file) or {"error": "it ended without a result"}
    lines = [line.strip() for line in last_lines(file.with_suffix(".err"), 20) if line.strip()]
    return {"error": lines[-1] if lines else f"it ended with status {status}"}


def main(fields: str, file: str) -> None:
    worker = Worker(**json.loads(fields))
    die_with_parent(worker.parent)

    import torch

    times = _times(worker) if worker.world > 1 else []
    result = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "times": times}
    Path(file).write_text(json.dumps(result))
    exit_without_teardown(0)


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
        world_size=worker.world, timeout=timedelta(seconds=_RENDEZVOUS_S),
    )  # fmt: skip
    measured: list[list[float]] = []
    size, started = _SMALLEST, time.monotonic()
    _all_reduce(torch.ones(16, device=device))  # the first all-reduce opens the connections
    while size <= _LARGEST:
        data = torch.ones(size // 4, device=device)
        _all_reduce(data)
        times = sorted(_all_reduce(data) for _ in range(_REPETITIONS))
        measured.append([size, times[len(times) // 2]])
        expected = times[-1] * _FACTOR * (_REPETITIONS + 1)
        left = torch.tensor([_MEASURE_S - (time.monotonic() - started) - expected])
        dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks continue, or none
        if left.item() < 0:
            break
        size *= _FACTOR
    dist.barrier()
    dist.destroy_process_group()
    return measured


def _all_reduce(data: torch.Tensor) -> float:
    """Return the seconds of one all-reduce on the slowest rank. Taking the maximum keeps ``data`` unchanged."""
    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    dist.all_reduce(data, dist.ReduceOp.MAX)
    if data.is_cuda:
        torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
