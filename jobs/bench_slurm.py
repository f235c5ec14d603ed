"""Cost of runs and sweeps to a Slurm user: seconds to submit, to list, from "save" to "queued again", and steps lost.

    python -m tests.infra.slurm --nodes 2 -- python jobs/bench_slurm.py      # on a cluster made for it (root)
    python jobs/bench_slurm.py                                                # on the one you are logged in to

The job is the default one, bytes_gpt, on two nodes. All actions use `launch`, as a user would.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

LAUNCH = (sys.executable, "-P", "-c", "from launcher.cli import main; main()")


def launch(*arguments: str) -> tuple[float, str]:
    """Run `launch`; return its seconds and output."""
    start = time.perf_counter()
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def wait_for(run: Path, event: str, count: int, seconds: float = 300) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while len(matching := [each for each in events(run) if each["event"] == event]) < count:
        if time.monotonic() > end:
            sys.exit(f"waited {seconds} s for the {count}th {event} of {run}")
        time.sleep(0.05)
    return matching[count - 1]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[int]:
    if not (run / "metrics.jsonl").exists():
        return []
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def between(run: Path, times: int) -> list[float]:
    """Return the seconds from SIGUSR2 until the job is queued again, ``times`` times, at random moments of a step."""
    seconds: list[float] = []
    for turn in range(1, times + 1):
        attempt = wait_for(run, "started", turn)
        while not steps(run) or steps(run)[-1] < attempt["from_step"] + 5:
            time.sleep(0.05)
        time.sleep(random.random())
        start = time.time()
        subprocess.run(["scancel", "--signal=USR2", attempt["job"]], check=True)
        seconds.append(datetime.fromisoformat(wait_for(run, "requeued", turn)["at"]).timestamp() - start)
    return seconds


def listing(run: Path, directory: Path, count: int) -> float:
    """Return the seconds of `launch runs` over ``count`` runs."""
    for number in range(count):
        copy = directory / f"run{number}"
        copy.mkdir(parents=True)
        for name in ("plan.json", "job.json", "incarnation.json", "metrics.jsonl", "config.yaml"):
            shutil.copy(run / name, copy)
    return launch("runs", "--dir", str(directory))[0]


def sweep(directory: Path) -> tuple[float, float, int]:
    """Return the seconds to submit 200 cells of two shapes and to list them, and how many were seen in the queue."""
    submit_s, _ = launch(
        "train", "-m", "cluster=slurm", "cluster.workers_per_node=1,2", "train.seed=range(0,100)", "sweep.name=cells",
        f"run.dir={directory}", "train.steps=60", "--quiet",
    )  # fmt: skip
    list_s, listed = launch("runs", "cells", "--dir", str(directory), "--json")
    queued = sum(cell["state"] in ("pending", "running") for cell in json.loads(listed))
    launch("cancel", "cells", "--dir", str(directory))
    return submit_s, list_s, queued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/bench-slurm"))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    run, planned_steps = options.dir / "bench", 60
    submit_s, _ = launch(
        "train", "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", "run.name=bench",
        f"run.dir={options.dir}", f"train.steps={planned_steps}",
    )  # fmt: skip
    requeue_s = between(run, options.times)
    wait_for(run, "done", 1, 600)
    recorded = steps(run)
    resumed = [event["from_step"] for event in events(run) if event["event"] == "started"]
    stopped = [event["step"] for event in events(run) if event["event"] == "stopped"]
    list_s = listing(run, options.dir / "many", options.runs)
    cells_s, cells_list_s, queued = sweep(options.dir)
    print(f"submitted in                          {submit_s:.2f} s")
    print(f"SIGUSR2 to saved and queued again     {', '.join(f'{s:.2f}' for s in requeue_s)} s")
    print(f"steps lost by {len(requeue_s)} requeues            {sum(stopped) - sum(resumed[1:])}")
    print(f"steps recorded once each, in order    {recorded == list(range(1, planned_steps + 1))}")
    print(f"launch runs over {options.runs} runs            {list_s:.2f} s")
    print(f"a sweep of 200 cells submitted in     {cells_s:.2f} s; {queued} of them in the queue")
    print(f"launch runs of that sweep             {cells_list_s:.2f} s")


if __name__ == "__main__":
    main()
