"""Cost of a checkpoint: how long it stops training, written synchronously and asynchronously, alternating in one run.

    launch run -- jobs/bench_checkpoint.py [--strategy ddp|fsdp] [--rounds 8] [--width 1700] [--dir DIRECTORY]

The state is that of AdamW on a chain of square layers: 12 bytes per parameter, 104 MB by default. `stall`: time that a
save delays the next step, median over rounds. `write`: from the copy to the commit. `step`: alone, and during an
asynchronous write. `memory`: growth of rank 0's peak resident set beyond that of the preceding steps and synchronous
saves, compared with the bytes of its shard (the whole state if every rank has all of it).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from launcher import Engine, make_plan
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import save as checkpoint_save
from launcher.train.checkpoint.async_save import Saver
from launcher.train.checkpoint.run_totals import RunTotals
from launcher.train.metrics import Metrics

LAYERS, ALONE, WARM_UP = 3, 4, 6


class ResidentSet:
    """Peak resident set of this process so far, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            time.sleep(0.003)


def steps_of(engine: Engine, width: int) -> Generator[float, None, None]:
    """Return the seconds of each step."""
    data = list(torch.randn(64, width, generator=torch.Generator().manual_seed(0)))
    for window in engine.windows(data):
        dist.barrier()
        start = time.perf_counter()
        for batch in window:
            engine.backward((engine.model(batch) ** 2).sum(), len(batch))
        engine.step()
        yield time.perf_counter() - start


def save(saver: Saver, *, synchronous: bool) -> float:
    """Return the seconds that a save stops the steps."""
    dist.barrier()
    start = time.perf_counter()
    saver.save({}, next_due=None if synchronous else "in the next round")
    dist.barrier()
    return time.perf_counter() - start


def on_any_rank(flag: bool) -> bool:
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return flags.item() > 0


def measure(strategy: str, rounds: int, width: int, directory: Path) -> str:
    options = [
        f"strategy={strategy}", "precision=fp32", "batch.global_size=16", "batch.micro_size=8", "cluster.device=cpu",
        "train.loader_workers=0", "run.calibrate_s=0", f"train.steps={10**9}", "checkpoint.keep=2",
    ]  # fmt: skip
    plan = make_plan(options, samples=64)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-4), plan, shard_units=lambda m: [*m.children()])
    saver = Saver(engine, RunTotals(engine), Fence(RunPaths(directory), Incarnation()), threading.Event())
    steps = steps_of(engine, width)
    resident = ResidentSet()
    for _ in range(WARM_UP):
        next(steps)
        save(saver, synchronous=True)
    before = resident.peak
    times: dict[str, list[float]] = {name: [] for name in ("sync", "async", "write", "alone", "with a write")}
    for number in range(rounds):
        times["alone"] += [next(steps) for _ in range(ALONE)]
        for synchronous in (True, False) if number % 2 else (False, True):
            next(steps)
            times["sync" if synchronous else "async"].append(save(saver, synchronous=synchronous))
            if synchronous:
                continue
            written: Metrics = {}
            while on_any_rank(not (written := written or saver.take_metrics())):
                times["with a write"].append(next(steps))
            times["write"].append(written["time/checkpoint_write_s"])
    steps.close()
    whole = checkpoint_save.predicted_bytes(engine)
    local = whole if strategy == "ddp" else whole / engine.world.size
    median = {name: statistics.median(values or [float("nan")]) for name, values in times.items()}
    return (
        f"{strategy:<5} state {whole / 1e6:.0f} MB   stall: synchronous {median['sync'] * 1e3:.0f} ms, asynchronous "
        f"{median['async'] * 1e3:.0f} ms ({median['async'] / median['sync']:.1%}; "
        f"first: {times['async'][0] * 1e3:.0f} ms)   write {median['write'] * 1e3:.0f} ms\n"
        f"      step alone {median['alone'] * 1e3:.0f} ms, with a write {median['with a write'] * 1e3:.0f} ms "
        f"({len(times['with a write'])} of them)   memory: resident set "
        f"+{(resident.peak - before) / 1e6:.1f} MB; a rank's shard {local / 1e6:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], action="append")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1700, help="of the layers; the state has 36 bytes x its square")
    parser.add_argument("--dir", help="directory for the checkpoints; default: the system's temporary directory")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for strategy in arguments.strategy or ["ddp", "fsdp"]:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as own:
            shared = [own]
            dist.broadcast_object_list(shared, 0)
            line = measure(strategy, arguments.rounds, arguments.width, Path(shared[0]))
            dist.barrier()
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
