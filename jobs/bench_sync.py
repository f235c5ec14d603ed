"""Cost of each sync policy between hosts: step time, wire bytes, exposed communication, and the lower limit of a step.

    make bench-sync                                                     # two shaped hosts on this machine, all of it
    launch run cluster=hosts ... -- jobs/bench_sync.py measure --rate NAME --out results.jsonl    # on hosts of yours
    python jobs/bench_sync.py report --results results.jsonl --to docs/explanations

With one worker per host: every policy of DDP and FSDP; with several: of HSDP, with one shard group per host.

The limit of a step is its computation (the same step without communication, measured), plus its bytes at the rate of a
plain TCP stream between these hosts (measured), minus what can be hidden behind the backward passes that synchronise
gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, Loss, make_plan
from launcher.plan.windows import WARM_UP_WINDOWS
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.train.engine import calibration
from launcher.train.engine.calibration import Calibrated, WindowSync
from launcher.train.measure.comm_meter import CommStats

ACCUMULATIONS = (1, 2, 4, 8, 16)
MICRO_SIZE = 4
STREAM_BYTES = 4 * 2**20
# heading of the part of sync.md that jobs/bench_speedup.py writes
SPEEDUP = "## The printed speed-up"
ACROSS = [
    ("ddp", "every", "none"), ("ddp", "boundary", "none"), ("ddp", "boundary", "bf16"), ("ddp", "boundary", "powersgd"),
    ("fsdp", "every", "none"), ("fsdp", "boundary", "none"), ("fsdp", "gather_once", "none"),
]  # fmt: skip
GROUPED = [("hsdp", sync, "none") for sync in ("every", "boundary", "replicas_at_boundary", "gather_once")]


def line_rate() -> float:
    """Return the bytes per second of a plain TCP stream between the first two hosts, both directions at once."""
    local, peer = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank()
    address: list[Any] = [None]
    server = socket.create_server(("", 0)) if peer == 0 else None
    if server is not None:
        address = [(os.environ["MASTER_ADDR"], server.getsockname()[1])]
    dist.broadcast_object_list(address, 0)
    rate = torch.zeros(1, dtype=torch.float64)
    if peer in (0, local):
        stream = server.accept()[0] if server is not None else socket.create_connection(address[0])
        for _ in range(5):  # best of five: TCP's window grows, and the peer may start late
            start = time.perf_counter()
            sender = threading.Thread(target=stream.sendall, args=(bytes(STREAM_BYTES),))
            sender.start()
            left = STREAM_BYTES
            while left:
                left -= len(stream.recv(min(left, 2**16)))
            sender.join()
            rate[0] = max(rate.item(), STREAM_BYTES / (time.perf_counter() - start))
        stream.close()
    if server is not None:
        server.close()
    dist.broadcast(rate, 0)
    return rate.item()


def backward_s(task: BytesGPT, batch: Tensor) -> float:
    """Return the seconds of one micro-batch's backward pass while all ranks compute."""
    model: nn.Module = task.model()
    times: list[float] = []
    for _ in range(6):
        loss = task.loss(model, batch).total
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def cell(
    task: BytesGPT, data: Any, strategy: str, sync: str, compress: str, accumulation: int, windows: int
) -> tuple[Calibrated, float, CommStats]:
    """Run one policy for a few windows; return its calibration, the median step in seconds, and a window's traffic."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    options = [
        f"strategy={strategy}", f"strategy.sync={sync}", f"batch.micro_size={MICRO_SIZE}",
        f"batch.accumulation={accumulation}", f"run.calibrate_s={10**6}", "precision=fp32", "cluster.device=cpu",
        "train.loader_workers=0", f"train.steps={10**6}",
    ]  # fmt: skip
    if strategy == "ddp":
        options += ["strategy.bucket_mb=1"]  # the model has 7.6 MB: several buckets are needed for overlap
    if compress != "none":
        options += [f"strategy.compress={compress}"] + ["powersgd.start=2"] * (compress == "powersgd")
    if strategy == "hsdp":
        options.append(f"strategy.shard_size={local}")
    plan = make_plan(options, samples=len(data))
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, rehearses=True))  # the model is small
    torch.manual_seed(0)
    engine = Engine(task.model, lambda p: torch.optim.AdamW(p, 1e-3), plan, shard_units=task.shard_units)
    calibration.MAX_ROUNDS = windows
    engine._calibration._kinds = lambda: [
        WindowSync.none,
        WindowSync.policy,
    ]  # sync=every is measured in cells of its own

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, float | Tensor]:
        summed: Loss = task.loss(model, batch)
        return summed.total, summed.items

    times: list[float] = []
    for number, window in enumerate(engine.windows(data, forward=loss), 1):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        result = engine.step()
        if number > WARM_UP_WINDOWS:
            times.append(result.step_s)
        if len(times) == windows:
            assert engine.calibrated is not None
            return engine.calibrated, statistics.median(times), result.comm
    raise AssertionError("the data ended before the measurement")


def measure(rate: str, out: Path, windows: int, accumulations: list[int]) -> None:
    dist.init_process_group("gloo")
    local, rank = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank()
    task = BytesGPT(width=192, depth=4, heads=3, seq_len=64)
    data = task.train_data()
    batch = torch.utils.data.default_collate([data[i] for i in range(MICRO_SIZE)])
    bytes_a_second, one_backward_s = line_rate(), backward_s(task, batch)
    for strategy, sync, compress in ACROSS if local == 1 else GROUPED:
        for accumulation in accumulations:
            calibrated, step_s, comm = cell(task, data, strategy, sync, compress, accumulation, windows)
            if strategy == "hsdp":  # a shard group is a host: only traffic between replicas crosses the link
                link_bytes = local * sum(t.wire_bytes for kind, t in comm.kinds.items() if kind.value == "all_reduce")
            else:
                link_bytes = comm.wire_bytes
            wire_s = link_bytes / bytes_a_second
            hidden_s = (accumulation if sync == "every" else 1) * one_backward_s
            assert calibrated.exposed is not None, calibrated.not_measured
            exposed_s = calibrated.exposed.value
            compute_s = step_s - exposed_s
            limit_s = compute_s + max(0.0, wire_s - hidden_s)
            record = {
                "rate": rate, "strategy": strategy, "sync": sync, "compress": compress, "accumulation": accumulation,
                "step_s": step_s, "exposed_s": exposed_s, "overlap": calibrated.overlap,
                "compute_s": compute_s, "payload_bytes": comm.payload_bytes, "link_bytes": link_bytes,
                "line_rate": bytes_a_second, "backward_s": one_backward_s, "limit_s": limit_s,
                "ratio": step_s / limit_s,
            }  # fmt: skip
            if rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(_row(record), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _name(record: dict[str, Any]) -> str:
    compressed = "" if record["compress"] == "none" else f" {record['compress']}"
    return f"{record['strategy']} {record['sync']}{compressed}"


def machine() -> str:
    """Return the number and model of this machine's processors."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores: {', '.join(dict.fromkeys(models))}"


def _row(record: dict[str, Any]) -> str:
    return (
        f"| {record['rate']} | {_name(record)} | {record['accumulation']} | {record['step_s'] * 1e3:,.0f} | "
        f"{record['exposed_s'] * 1e3:,.0f} | {record['link_bytes'] / 1e6:,.2f} | "
        f"{record['payload_bytes'] / 1e6:,.2f} | {record['limit_s'] * 1e3:,.0f} | {record['ratio']:.2f} |"
    )


def report(results: Path, to: Path) -> None:
    """Write sync.md, a table, and sync.png: milliseconds per micro-batch over accumulation, one panel per rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in results.read_text().splitlines()]
    head = (
        "| link | policy | accumulation | step, ms | exposed, ms | on the link, MB a host | payload, MB a rank | "
        "limit, ms | step / limit |\n|---|---|---|---|---|---|---|---|---|"
    )
    rates = list(dict.fromkeys(record["rate"] for record in records))
    made = f"Made by `make bench-sync` (`jobs/bench_sync.py`) on {machine()}."
    lines = ["# Sync policies between two hosts", "", made, ""]
    for rate in rates:
        bytes_a_second = statistics.median(record["line_rate"] for record in records if record["rate"] == rate)
        lines.append(f"- {rate}: a plain TCP stream reached {bytes_a_second * 8 / 1e6:,.0f} Mbit/s, both ways at once.")
    lines += ["", "![milliseconds a micro-batch](sync.png)", "", head, *map(_row, records)]
    page = to / "sync.md"
    _, heading, after = page.read_text().partition(SPEEDUP) if page.exists() else ("", "", "")
    page.write_text("\n".join(lines) + "\n" + (f"\n{heading}{after}" if heading else ""))
    figure, panels = pyplot.subplots(1, len(rates), figsize=(6.5 * len(rates), 5), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(map(_name, records)))
    colours = {name: pyplot.get_cmap("tab20")(number) for number, name in enumerate(names)}
    for rate, panel in zip(rates, panels[0], strict=True):
        for name in names:
            cells = [record for record in records if record["rate"] == rate and _name(record) == name]
            cells.sort(key=lambda record: record["accumulation"])
            counts = [record["accumulation"] for record in cells]
            for key, line in (
                (("step_s", {"marker": "o", "label": name}), ("limit_s", {"linestyle": ":"})) if cells else ()
            ):
                panel.plot(counts, [r[key] * 1e3 / r["accumulation"] for r in cells], color=colours[name], **line)
        panel.set(title=f"{rate}, two hosts; dotted: the limit", xscale="log", yscale="log")
        panel.set(xlabel="accumulation", ylabel="ms a micro-batch", xticks=ACCUMULATIONS)
        panel.set_xticklabels(map(str, ACCUMULATIONS))
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(to / "sync.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run by `launch run` on the hosts to measure")
    measuring.add_argument("--rate", required=True, help="name of these links in the table")
    measuring.add_argument("--out", type=Path, required=True, help="file to which rank 0 appends JSON lines")
    measuring.add_argument("--windows", type=int, default=3, help="also the rounds of the calibration; at least 3")
    measuring.add_argument("--accumulation", type=int, nargs="*", default=list(ACCUMULATIONS))
    reporting = verbs.add_parser("report", help="write a table and a plot")
    reporting.add_argument("--results", type=Path, required=True)
    reporting.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.verb == "measure" and arguments.windows < 3:
        measuring.error(f"argument --windows: must be at least 3, not {arguments.windows}")
    if arguments.verb == "measure":
        measure(arguments.rate, arguments.out, arguments.windows, arguments.accumulation)
    else:
        report(arguments.results, arguments.to)


if __name__ == "__main__":
    main()
