"""Benchmark of `batch.balance=length`: the same windows of real text with it and without, in turns in one run.

    launch run cluster.workers_per_node=2 -- jobs/bench_balance.py [--steps 20] [--strategy ddp] [--sync boundary]

A sample is one function of this Python's standard library, as bytes, cut at --longest. The model is the byte-level GPT
of task=bytes_gpt; micro-batches are padded to their longest sample. Both sides train the same model on equal windows,
one optimizer step of one side after one of the other, so that noise of the machine affects both. `paired` is the median
of each window's ratio, with the middle half of the ratios; "losses differ by" is the largest relative difference of a
window's loss between the two sides.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sysconfig
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from launcher import ArrangedData, Engine, make_plan
from launcher.tasks.bytes_model import GPT

WARM_UP = 3


def functions(longest: int, files: int) -> list[Tensor]:
    """Return the source text of each function in the standard library's first ``files`` modules, as bytes from 1."""
    texts: list[Tensor] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        source = path.read_text(encoding="utf-8", errors="replace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a module's text
            tree = ast.parse(source)
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = "".join(lines[node.lineno - 1 : node.end_lineno]).encode()[:longest]
                texts.append(torch.tensor([*text]) + 1)
    return texts


class Side:
    """One of the two ways to divide the windows; ``steps`` runs one optimizer step at a time."""

    def __init__(self, balance: str, texts: list[Tensor], arguments: argparse.Namespace) -> None:
        self.positions = self.tokens = 0
        self.losses: list[float] = []
        options = [
            f"batch.balance={balance}", f"batch.global_size={arguments.global_size}", "precision=fp32",
            f"batch.micro_size={arguments.micro_size}", f"strategy={arguments.strategy}", "cluster.device=cpu",
            f"strategy.sync={arguments.sync}", f"train.steps={10**9}", "run.calibrate_s=0", "train.loader_workers=0",
        ]  # fmt: skip
        self.data = ArrangedData(texts, lengths=[len(text) - 1 for text in texts])
        self.plan = make_plan(options, samples=len(texts))
        torch.manual_seed(0)
        model = GPT(257, arguments.width, arguments.depth, arguments.width // 64, arguments.longest, 0.0)
        self.engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), self.plan, shard_units=_blocks)

    def collate(self, samples: list[Tensor]) -> Tensor:
        batch = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        self.positions += batch[:, 1:].numel()
        self.tokens += sum(len(sample) - 1 for sample in samples)
        return batch

    def steps(self) -> Generator[None]:
        for window in self.engine.windows(self.data, self.collate):
            for batch in window:
                targets = batch[:, 1:].flatten()
                logits = self.engine.model(batch[:, :-1]).flatten(0, 1)
                total = functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
                self.engine.backward(total, (targets != 0).sum())
            self.losses.append(self.engine.step().loss)
            yield

    @property
    def padding(self) -> float:
        """Padding of all ranks' micro-batches so far, as a part of all positions."""
        counts = torch.tensor([self.tokens, self.positions], dtype=torch.float64)
        dist.all_reduce(counts)
        return 1 - (counts[0] / counts[1]).item()


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured optimizer steps of each side")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--sync", choices=["boundary", "every"], default="boundary")
    parser.add_argument("--global-size", type=int, default=128)
    parser.add_argument("--micro-size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=1024, help="bytes at which a function is cut")
    parser.add_argument("--files", type=int, default=60, help="modules of the standard library")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    texts = [text for text in functions(arguments.longest, arguments.files) if len(text) > 1]
    sides = {balance: Side(balance, texts, arguments) for balance in ("none", "length")}
    loops = {balance: side.steps() for balance, side in sides.items()}
    times: dict[str, list[float]] = {balance: [] for balance in sides}
    for step in range(WARM_UP + arguments.steps):
        for balance in sorted(sides, reverse=bool(step % 2)):  # alternate, so that neither always has warm caches
            dist.barrier()
            started = time.perf_counter()
            next(loops[balance])
            if step >= WARM_UP:
                times[balance].append(time.perf_counter() - started)
    padding = {balance: side.padding for balance, side in sides.items()}
    off = max(abs(a / b - 1) for a, b in zip(sides["none"].losses, sides["length"].losses, strict=True))
    low, median, high = statistics.quantiles(
        [a / b for a, b in zip(times["none"], times["length"], strict=True)], n=4
    )  # fmt: skip
    if dist.get_rank() == 0:
        lengths = sorted(len(text) - 1 for text in texts)
        print(
            f"{len(texts)} functions, median {lengths[len(lengths) // 2]} bytes, mean {statistics.fmean(lengths):.0f}\n"
            f"{arguments.strategy}, sync={arguments.sync}, {sides['none'].plan.batch.text}\n"
            + "\n".join(
                f"balance={balance:<7} {statistics.median(times[balance]) * 1e3:8.0f} ms a step   padding "
                f"{padding[balance]:.1%}"
                for balance in sides
            )
            + f"\npaired {median:.2f} times as fast, middle half {low:.2f} to {high:.2f}, {arguments.steps} windows; "
            f"losses differ by {off:.1e}",
            flush=True,
        )
    for loop in loops.values():
        loop.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
