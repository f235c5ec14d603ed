"""Time of `launch runs`, `status` and `report` for many runs, and size of the page.

    python jobs/bench_report.py [--runs 200] [--steps 10000] [--keep DIR]     # writes 3 GB, to a temporary directory
    python jobs/bench_report.py --runs 5000 --steps 30 [--rounds 3] [--killed]

Each run has left its entry, as runs do when they end; with --killed none has, and their files are read. The table has
the median and the range of the rounds.
The runs are synthetic: accumulation × workers × seeds, with as many lines as real ones, of the same length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from launcher.config.hydra import compose
from launcher.config.schema import Config
from launcher.launch import local
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import TaskPlan
from launcher.plan.solve import solve
from launcher.quantities import count
from launcher.record.report_entry import identity_of, leave_entry, read_entry
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths

# fields of a record besides the figures below
REST = {f"comm/all_reduce/figure_{number}": 0.1234567890123 + number for number in range(26)}


@functools.cache
def composed(steps: int, accumulation: int, workers: int) -> Config:
    sizes = [f"batch.accumulation={accumulation}", f"cluster.workers_per_node={workers}", f"train.steps={steps}"]
    return compose([*sizes, "batch.global_size=256"])


def make(directory: Path, name: str, steps: int, accumulation: int, workers: int, seed: int) -> None:
    """Write one finished run."""
    config, noise = composed(steps, accumulation, workers), random.Random(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    task = TaskPlan(target="a.Task", params={}, samples=10**9, parameters=1, gradient_bytes=4, unit_parameters=1)
    run = RunInfo(name=name, id=name, dir=str(directory / name), created="2026-01-01T00:00:00+00:00", version="0")
    plan = solve(config, Site(gpus=0, cores=2, cwd=str(directory)), task, run)
    sections = [
        yaml.dump({key: section}) for key, section in json.loads(json.dumps(dataclasses.asdict(config))).items()
    ]
    local.create(plan, "".join(sections))
    step_s, sent, rest = (0.3 + 0.01 * accumulation) / workers**0.9, 8e6 * (workers > 1), json.dumps(REST)[1:]
    fixed = {f"batch/{key}": size for key, size in dataclasses.asdict(plan.batch).items()} | {
        "batch/samples": 256, "comm/wire_bytes": sent, "comm/wire_bytes_every": sent * accumulation,
    }  # fmt: skip
    with plan.paths.metrics.open("w") as file:
        for step in range(1, steps + 1):
            own = {
                "step": step, "train/loss": 6 * (1 + step / 50) ** -0.3 + noise.gauss(0, 0.05), "time/data_s": 0.001,
                "time/step_s": step_s * noise.uniform(0.9, 1.2), "time/total_s": step * step_s,
                "progress/samples": step * 256, **fixed,
            }  # fmt: skip
            if step == 20:
                own |= {"comm/step_s": step_s, "comm/exposed_s": 0.01, "comm/speedup": 1 + 0.1 * accumulation}
                own |= {"comm/speedup_low": 1 + 0.09 * accumulation, "comm/speedup_high": 1 + 0.11 * accumulation}
            file.write(f"{json.dumps(own)[:-1]}, {rest}\n")
    ended = dataclasses.replace(Submission.now().by_this_process(), ended=True)
    history.add_submission(plan.paths, ended)
    write_json(plan.paths.newest_incarnation, {"incarnation": "0.0", "job": None, "nodes": ["node0"], "ranks": workers})
    write_json(plan.paths.summary, {"verdict": "done"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--killed", action="store_true", help="the runs were killed before they left an entry")
    parser.add_argument("--keep", type=Path, help="directory in which the runs are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary) / "runs"
        grid = itertools.product(range(arguments.runs), (1, 2, 4, 8), (1, 2, 4, 8))
        names = [f"run{number:04}" for number in range(arguments.runs)]
        for name, (seed, accumulation, workers) in zip(names, grid, strict=False):
            if not (directory / name).exists():
                make(directory, name, arguments.steps, accumulation, workers, seed)
            paths = RunPaths(directory / name)
            if arguments.killed:
                paths.report_entry.unlink(missing_ok=True)
            elif read_entry(paths.root, identity_of(paths.root)) is None:
                leave_entry(paths)
        size = sum(path.stat().st_size for path in directory.glob("*/metrics.jsonl"))
        ended = "killed before they left an entry" if arguments.killed else "with their entries"
        print(f"{arguments.runs} runs of {arguments.steps:,} steps, {size / 1e9:.2f} GB of records, {ended}")
        commands = {
            "`launch runs`": ["runs"], "`launch status` of one": ["status", names[-1]],
            "`launch report`": ["report", str(directory)],
        }  # fmt: skip
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                taken[name].append(measured([*command, "--dir", str(directory)]))
        load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
        print(f"load average {load} on {len(os.sched_getaffinity(0))} cores; {count(arguments.rounds, 'round')}\n")
        print("| | CPU time | wall time |\n|---|---|---|")
        for name, rounds in taken.items():
            print(f"| {name} | {' | '.join(map(spread, zip(*rounds, strict=True)))} |")
        print(f"\npage {(directory / 'report.html').stat().st_size / 1e6:.1f} MB")


def spread(seconds: Sequence[float]) -> str:
    """Return ``1.5 s (1.4 to 1.7)``: the median and the range."""
    across = f" ({min(seconds):.1f} to {max(seconds):.1f})" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.1f} s{across}"


def measured(arguments: list[str]) -> tuple[float, float]:
    """Run `launch`; return the CPU time of all its processes and the wall time, in seconds."""
    code, before = "from launcher.cli import main; main()", resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-P", "-c", code, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, seconds


if __name__ == "__main__":
    main()
