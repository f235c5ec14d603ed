"""One optimizer step in this launcher's engine, in hand-written loops and in other libraries, taking turns in one run.

    make bench-peers                                                  # here, and on two shaped hosts on this machine
    launch run [cluster=hosts ...] -- jobs/bench_peers.py measure --setting NAME --out results.jsonl
    python jobs/bench_peers.py report --results results.jsonl --to docs/explanations

All contenders live in the same processes and train the same model from the same initial values on the same
micro-batches. They first take two windows, after which their parameters are compared with those of one process that
computes each window as one big batch in fp64. The windows that are timed come after these, in rounds: each contender
takes one window in each round, and the order rotates. A window's time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench_contenders import (
    CLIP_NORM,
    HAND_WRITTEN,
    IGNORED,
    LEARNING_RATE,
    Contender,
    Job,
    PeakMemory,
    SentBytes,
    loss_sum,
)
from bench_libraries import LIBRARIES
from bench_sync import ACCUMULATIONS, MICRO_SIZE, machine
from peers_report import CHECKED_WINDOWS, report
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from launcher.tasks.bytes_gpt import BytesGPT

MIN_ROUNDS, MAX_ROUNDS = 3, 200
UNEVEN_ACCUMULATION = 4
PACKAGES = {
    "Accelerate": "accelerate", "Lightning Fabric": "lightning-fabric", "transformers": "transformers",
    "torchtitan": "torchtitan",
}  # fmt: skip


def samples(text: Tensor, *, uneven: bool) -> TensorDataset:
    """Return tokens and targets of ``text`` [samples, time + 1]. ``uneven``: of each sample only the first few targets
    count, between one and all of them."""
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    if uneven:
        count, time_steps = targets.shape
        lengths = torch.randint(1, time_steps + 1, (count, 1), generator=torch.Generator().manual_seed(0))
        targets[torch.arange(time_steps) >= lengths] = IGNORED
    return TensorDataset(tokens, targets)


def reference(job: Job, windows: int) -> tuple[Tensor, Tensor]:
    """Return all parameters before and after ``windows`` optimizer steps of one process, each on one batch, in fp64."""
    model = job.model().double()
    before = flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for window in range(windows):
        parts = [batch for rank in range(dist.get_world_size()) for batch in job.micro_batches(window, rank)]
        tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        logits = model(tokens)
        items = (targets != IGNORED).sum()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        assert torch.isclose(loss.float(), loss_sum(logits, targets) / items)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return before, flat(model)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters of a model in one fp64 tensor; every rank calls this for a sharded one."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in whole])


def difference(contender: Contender, expected: tuple[Tensor, Tensor]) -> float:
    """Return the distance of a contender's parameters from the expected ones, relative to the distance trained."""
    before, after = expected
    return ((flat(contender.raw) - after).norm() / (after - before).norm()).item()


def link_bytes() -> int | None:
    """Return the bytes that this host has sent on its link; None if it is the whole machine, not a shaped host."""
    counters = psutil.net_io_counters(pernic=True)
    return counters["eth0"].bytes_sent if "eth1" in counters and "eth0" in counters else None


@contextmanager
def active(*counters: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for counter in counters:
            stack.enter_context(counter)
        yield


class Cell:
    """All contenders at one accumulation."""

    def __init__(self, job: Job, kinds: Sequence[type[Contender]]) -> None:
        self.job = job
        self.contenders = [kind(job) for kind in kinds]
        self.times: dict[str, list[float]] = {each.name: [] for each in self.contenders}
        self.sent: dict[str, tuple[int, int | None]] = {}
        self.peak: dict[str, int] = {}

    def check(self) -> dict[str, float]:
        """Take the first windows, count bytes and memory of the last of them, and compare with the reference."""
        expected = reference(self.job, CHECKED_WINDOWS)
        for window in range(CHECKED_WINDOWS):
            counted = window == CHECKED_WINDOWS - 1
            for each in self.contenders:
                counter, memory, before = SentBytes(), PeakMemory(self.job.data), link_bytes()
                dist.barrier()
                each.step(window, active(memory, counter) if counted else nullcontext())
                dist.barrier()
                after = link_bytes()
                self.sent[each.name] = counter.bytes, None if before is None or after is None else after - before
                self.peak[each.name] = memory.peak
        return {each.name: difference(each, expected) for each in self.contenders}

    def time(self, budget_s: float) -> None:
        """Take turns for about ``budget_s`` seconds, and for at least ``MIN_ROUNDS``, which quartiles need."""
        start = time.perf_counter()
        for number in range(MAX_ROUNDS):
            shift = number % len(self.contenders)
            for each in self.contenders[shift:] + self.contenders[:shift]:
                dist.barrier()
                start_s = time.perf_counter()
                each.step(CHECKED_WINDOWS + number, nullcontext())
                self.times[each.name].append(time.perf_counter() - start_s)
            over = torch.tensor(number + 1 >= MIN_ROUNDS and time.perf_counter() - start > budget_s)
            dist.broadcast(over, 0)
            if over:
                break
        for name, own in self.times.items():
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            self.times[name] = slowest.tolist()

    def close(self) -> None:
        for each in self.contenders:
            each.close()


def measure(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    width = arguments.width
    task = BytesGPT(width=width, depth=arguments.depth, heads=max(1, width // 64), seq_len=arguments.seq_len)
    kinds = [kind for kind in (*HAND_WRITTEN, *LIBRARIES) if not arguments.only or kind.name in arguments.only]
    bf16 = arguments.precision == "bf16"
    count = 4 * max(*arguments.accumulation, UNEVEN_ACCUMULATION) * MICRO_SIZE * dist.get_world_size()
    data = task.train_data()
    text = torch.stack([data[index] for index in range(count)]).long()
    same = {
        "setting": arguments.setting, "precision": arguments.precision, "ranks": dist.get_world_size(),
        "machine": machine(), "versions": versions(kinds),
    }  # fmt: skip
    cells = [(accumulation, False) for accumulation in arguments.accumulation]
    for accumulation, uneven in cells + [(UNEVEN_ACCUMULATION, True)] * arguments.uneven:
        job = Job(task, samples(text, uneven=uneven), accumulation, MICRO_SIZE, bf16)
        cell = Cell(job, kinds)
        differences = cell.check()
        if not uneven:
            cell.time(arguments.seconds)
        for each in cell.contenders:
            sent_bytes, on_link = cell.sent[each.name]
            record = {
                **same, "contender": each.name, "family": each.family, "loss": each.loss,
                "accumulation": accumulation, "uneven": uneven,
                "times_s": cell.times[each.name], "sent_bytes": sent_bytes, "link_bytes": on_link,
                "peak_bytes": cell.peak[each.name], "difference": differences[each.name],
            }  # fmt: skip
            if dist.get_rank() == 0:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(line(record), flush=True)
        cell.close()
    dist.barrier()
    dist.destroy_process_group()


def versions(kinds: Sequence[type[Contender]]) -> dict[str, str]:
    used = [package for start, package in PACKAGES.items() if any(kind.name.startswith(start) for kind in kinds)]
    return {name: version(name) for name in ("torch", *used)}


def line(record: dict[str, Any]) -> str:
    times = record["times_s"]
    taken = f"{statistics.median(times) * 1e3:8,.1f} ms ({len(times)} windows)" if times else "uneven items"
    return (
        f"{record['setting']:<12} {record['accumulation']:>3}  {record['contender']:<30} {taken}   "
        f"{record['sent_bytes'] / 1e6:7.2f} MB sent   {record['peak_bytes'] / 1e6:7.2f} MB held   "
        f"off by {record['difference']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run by `launch run` on the hosts to measure")
    measuring.add_argument("--setting", required=True, help="name of this machine or these links in the tables")
    measuring.add_argument("--out", type=Path, required=True, help="file to which rank 0 appends JSON lines")
    measuring.add_argument("--accumulation", type=int, nargs="*", default=list(ACCUMULATIONS))
    measuring.add_argument(
        "--seconds", type=float, default=25, help="of the rounds at each accumulation; at least three"
    )
    measuring.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    measuring.add_argument("--uneven", action="store_true", help="also compare on samples with unequal item counts")
    measuring.add_argument("--only", nargs="*", help="names of contenders; default: all of them")
    measuring.add_argument("--width", type=int, default=192)
    measuring.add_argument("--depth", type=int, default=4)
    measuring.add_argument("--seq-len", type=int, default=128, help="bytes of a sample")
    reporting = verbs.add_parser("report", help="write tables and a plot")
    reporting.add_argument("--results", type=Path, required=True)
    reporting.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments)
    else:
        report(arguments.results, arguments.to)


if __name__ == "__main__":
    main()
