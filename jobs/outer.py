"""Outer steps (outer=diloco) beside the synchronous job: held-out loss, time and bytes for the same samples.

    python jobs/outer.py                                  # two sites of one rank on this machine, both tasks
    python jobs/outer.py --tasks digits --ways synchronous streaming --seeds 3 -- train.steps=100 outer.every=25
    make bench-outer                                      # two shaped hosts on this machine, for each rate of the links

Words after `--` are keys of `launch train`, for all runs; those of `outer` only for the ones that have outer steps.
The held-out loss is that of the last step, after which all sites have one model, over all held-out data.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import launcher

ROOT = Path(__file__).resolve().parent.parent
JOB = (
    "batch.global_size=64", "batch.short_window=drop", "train.steps=300", "precision=fp32", "train.log_every=1",
    "train.eval_every=0", "run.calibrate_s=0", "checkpoint.enabled=false", "wandb.mode=disabled", "cluster.device=cpu",
)  # fmt: skip
TASKS = {
    "bytes_gpt": ("task.width=64", "task.depth=2", "task.heads=2", "task.seq_len=64", "task.eval_samples=null"),
    "digits": ("task=digits", "optimizer.lr=0.003"),
}
DILOCO = ("outer=diloco", "outer.group=1")
STREAMING = ("outer.fragments=4", "outer.delay=1")
# "averaging" is local SGD: the outer step replaces the shared parameters by the mean
WAYS = {
    "synchronous": (),
    "diloco": (*DILOCO,),
    "averaging": (*DILOCO, "outer.lr=1", "outer.momentum=0"),
    "streaming": (*DILOCO, *STREAMING),
}
HEAD = (
    "| link | sites | task | steps | way | held-out loss | seconds | kB a step | on the link | utilisation |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


class LinkBytes:
    """Callback that records what this host's interface has sent so far, by its own counter: task/link_bytes."""

    def __init__(self, interface: str = "eth0") -> None:
        self.interface = interface

    def on_step(self, _engine: Any, _result: Any) -> None:
        launcher.current().log("link_bytes", psutil.net_io_counters(pernic=True)[self.interface].bytes_sent)


def run(task: str, way: str, seed: int, link: list[str] | None, words: list[str], sites: int = 2) -> dict[str, Any]:
    """Run one job on two ranks, and return its figures. ``link``: between two hosts, as options of tests.infra.hosts;
    None: on this machine."""
    own = [word for word in words if WAYS[way] or not word.startswith("outer.")]
    launch = str(Path(sys.executable).with_name("launch"))
    with tempfile.TemporaryDirectory() as directory:
        job = [*JOB, *TASKS[task], *WAYS[way], f"train.seed={seed}", "run.name=run", *own]
        command = [launch, "train", "--quiet", *job]
        if link is None:
            command += [f"cluster.workers_per_node={sites}"]
        else:
            command += ["cluster.workers_per_node=1", "callbacks=[{_target_: jobs.outer.LinkBytes}]"]
            shaped = [sys.executable, "-m", "tests.infra.hosts", "--hosts", str(sites), *link]
            command += ["cluster=hosts", f"cluster.nodes={sites}", "cluster.rendezvous={first}:29400"]
            command = [*shaped, "--", *command]
        command += [f"run.dir={directory}/runs"]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"jobs/outer.py: {' '.join(command)}\n{done.stdout}{done.stderr}")
        record = Path(directory, "runs", "run", "metrics.jsonl")
        records = [json.loads(line) for line in record.read_text().splitlines()]
    name = " ".join(word.lstrip("-") for word in link[1:]) if link else "this machine"
    return {"link": name, "sites": sites, "task": task, "way": way, "seed": seed, **figures(records)}


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run of one rank per site or host, by its records of all steps.

    Bytes are those that a rank sends in a step, on average over the steps after the first: as recorded, and, between
    hosts, by the counter of its interface. Utilisation is the part of the time in which no rank waits for another one.
    A synchronous step counts all the time in which a collective is in progress, also where the backward pass hides it.
    """
    first, last = records[0], records[-1]
    outer = "outer/sites" in last
    sent, spent = ("outer/wire_bytes", "outer/time_s") if outer else ("comm/wire_bytes", "comm/time_s")
    steps = len(records) - 1
    seconds = last["time/total_s"] - first["time/total_s"]
    on_link = [record["task/link_bytes"] for record in (first, last) if "task/link_bytes" in record]
    return {
        "steps": last["step"], "samples": last["progress/samples"], "eval/loss": last["eval/loss"],
        "seconds": last["time/total_s"], "sent_bytes": sum(record[sent] for record in records[1:]) / steps,
        "link_bytes": (on_link[1] - on_link[0]) / steps if on_link else None,
        "utilisation": 1 - sum(record[spent] for record in records[1:]) / seconds,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows: medians over the seeds; of the loss the mean and its standard deviation."""
    of = operator.itemgetter("link", "sites", "task", "steps", "way")
    for key in dict.fromkeys(map(of, results)):
        same = [each for each in results if of(each) == key]
        losses = [each["eval/loss"] for each in same]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        seconds, sent, used = (
            statistics.median(e[name] for e in same) for name in ("seconds", "sent_bytes", "utilisation")
        )
        on_link = [each["link_bytes"] for each in same if each["link_bytes"] is not None]
        counted = f"{statistics.median(on_link) / 1e3:,.2f}" if on_link else "-"
        cells = [*map(str, key), f"{statistics.mean(losses):.4f}{spread}", f"{seconds:.1f}"]
        yield f"| {' | '.join([*cells, f'{sent / 1e3:,.2f}', counted, f'{used:.1%}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each way, with seeds 0, 1, ...")
    parser.add_argument("--sites", type=int, default=2, help="of one rank each")
    parser.add_argument("--rates", nargs="+", help="of the link between two hosts that this makes, such as 10mbit")
    parser.add_argument("--round-trip-ms", type=float, default=0, help="with --rates: of these links")
    parser.add_argument("--loss", type=float, default=0, help="with --rates: share of the packets that are lost")
    parser.add_argument("--out", type=Path, help="file to which each run appends its figures, as a JSON line")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    links: list[list[str] | None] = [None]
    if options.rates:
        far = ["--round-trip-ms", f"{options.round_trip_ms:g}", "--loss", f"{options.loss:g}"]
        far = far if options.round_trip_ms or options.loss else []
        links = [["--rate", rate, *far] for rate in options.rates]
    for link in links:
        for task in options.tasks:
            for seed in range(options.seeds):
                for way in options.ways:
                    results.append(run(task, way, seed, link, options.overrides, options.sites))
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(results[-1]) + "\n")
    print(HEAD, *table(results), sep="\n")


if __name__ == "__main__":
    main()
