"""Accuracy of the printed speed-up: a calibrated run of each cell against the ratio of two whole uncalibrated runs.

    make bench-speedup                                                   # on two shaped hosts on this machine
    launch run cluster=hosts ... -- jobs/bench_speedup.py --rate NAME    # on hosts of yours

A cell is a strategy (DDP, FSDP) with data that is read instantly or slowly. Of the two whole uncalibrated runs one has
sync=every and one the job's own policy; the ratio of their median steps is the expected `comm/speedup` of the
calibrated run. The three runs alternate, --steps windows at a time, so that noise of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from launcher import Engine, make_plan
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.train.checkpoint.run_totals import RunTotals

ACCUMULATION, MICRO_SIZE = 4, 4
HEAD = (
    "| link | strategy | ms to read a sample | own, ms | every, ms | more, ms | more as calibrated, ms | whole runs | "
    "printed | off |"
)


class Slow(Dataset[Any]):
    """Samples that each take ``read_s`` seconds to read, without using a processor."""

    def __init__(self, data: Any, read_s: float) -> None:
        self._data, self._read_s = data, read_s

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._read_s)
        return self._data[index]


def run(task: BytesGPT, data: Any, options: list[str]) -> Generator[tuple[float, RunTotals]]:
    """Train like the worker of `launch train`; yield each window's seconds, and the run's totals."""
    plan = make_plan(
        [*options, f"batch.micro_size={MICRO_SIZE}", f"batch.accumulation={ACCUMULATION}", "precision=fp32",
         "cluster.device=cpu", "train.loader_workers=1", "train.steps=100000"], samples=len(data),
    )  # fmt: skip
    torch.manual_seed(0)
    engine = Engine(task.model, lambda p: torch.optim.AdamW(p, 1e-3), plan, shard_units=task.shard_units)
    account = RunTotals(engine)

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, float | Tensor]:
        summed = task.loss(model, batch)
        return summed.total, summed.items

    for window in engine.windows(data, forward=loss):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        result = engine.step()
        account.add(result)
        yield result.step_s, account


def cell(strategy: str, read_s: float, arguments: argparse.Namespace) -> str:
    task = BytesGPT(width=96, depth=3, heads=3, seq_len=32)
    data = Slow(task.train_data(), read_s)
    own = [f"strategy={strategy}", f"strategy.sync={'boundary' if strategy == 'ddp' else 'gather_once'}"]
    options = {
        "calibrated": [*own, f"run.calibrate_s={arguments.calibrate_s}"],
        "own": [*own, "run.calibrate_s=0"],
        "every": [f"strategy={strategy}", "strategy.sync=every", "run.calibrate_s=0"],
    }
    # skip a piece's first windows: loader processes read ahead while the run was paused, and slow ones keep that
    # lead for long, because a step is only slightly faster than they are
    steps, skipped = (3 * arguments.steps, 2 * arguments.steps) if read_s else (arguments.steps, 3)
    runs = {name: run(task, data, each) for name, each in options.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    account: RunTotals | None = None
    for _ in range(arguments.pieces):
        for name, windows in runs.items():
            for number in range(steps):
                step_s, totals = next(windows)
                if number >= skipped:
                    times[name].append(step_s)
                if name == "calibrated":
                    account = totals
    assert account is not None
    # of the calibrated run, too, only windows from the middle of a piece
    middle = [seconds for number, seconds in enumerate(account.seconds, 2) if number % steps >= skipped]
    account.seconds.clear()
    account.seconds.extend(middle)
    figures = account.calibration()
    for windows in runs.values():
        windows.close()
    own_s, every_s = statistics.median(times["own"]), statistics.median(times["every"])
    calibrated = account.engine.calibrated
    if "comm/speedup" not in figures:
        return f"| {strategy} | {read_s * 1e3:g} | not measured: {calibrated and calibrated.not_measured} |"
    assert calibrated is not None
    assert calibrated.gain is not None
    gain = f"{calibrated.gain.value * 1e3:,.0f} ({calibrated.rounds} rounds)"
    printed, low, high = (figures[f"comm/speedup{end}"] for end in ("", "_low", "_high"))
    whole = every_s / own_s
    cells = [
        arguments.rate, strategy, f"{read_s * 1e3:g}", f"{own_s * 1e3:,.0f}", f"{every_s * 1e3:,.0f}",
        f"{(every_s - own_s) * 1e3:,.0f}", gain, f"{whole:.2f}",
        f"{printed:.2f} ({low:.2f} to {high:.2f})", f"{printed / whole - 1:+.1%}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", required=True, help="name of these links in the table")
    parser.add_argument("--steps", type=int, default=8, help="windows per piece")
    parser.add_argument("--pieces", type=int, default=4, help="pieces per run")
    parser.add_argument("--calibrate-s", type=float, default=20.0)
    parser.add_argument("--strategy", nargs="*", default=["ddp", "fsdp"])
    parser.add_argument("--read-ms", type=float, nargs="*", default=[0.0, 40.0], help="milliseconds to read a sample")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(HEAD)
        print("|" + "---|" * 10, flush=True)
    for strategy in arguments.strategy:
        for read_ms in arguments.read_ms:
            line = cell(strategy, read_ms / 1e3, arguments)
            if dist.get_rank() == 0:
                print(line, flush=True)
    if dist.get_rank() == 0:
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
