"""Cost of the engine: the same model and data in a hand-written loop and in `launch train`'s engine, in one run.

    launch run -- jobs/bench.py [--steps 60] [--case CASE] [--loader-workers 1]

`batches`: the MLP on ready batches in memory, which both loops read themselves. `fsdp`: FSDP2 by hand with the
collectives of sync=gather_once. `meter`, `noise`, `watches`: instead of a hand-written loop, the engine with its meter
disabled, without the norms from which the gradient noise scale is computed, or (FSDP2 of the MLP) without what looks
for lost writes, for another order of shard units, and at the first losses.

The two loops alternate step by step on the same ranks, so that noise of the machine affects both: `ratio` is that of
the two medians, `paired` the median of each step's ratio to its neighbour in the other loop, which is less sensitive to
noise. The engine also writes its metrics record, as `launch train` does. The hand-written loop is the shortest that
logs its mean loss: no exact average over items, no check, no record.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from launcher import Engine, RunPlan, make_plan
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.train.measure.comm_meter import CommStats
from launcher.train.metrics import Record, peak_memory, step_metrics
from launcher.train.parallel.fsdp import Fsdp
from launcher.train.parallel.lost_writes import LostWrites

WARM_UP = 5
CASES = ["bytes_gpt", "mlp", "batches", "fsdp", "meter", "noise", "watches"]
PARTS = ("meter", "noise", "watches")  # that the engine is compared without


class Case:
    """Model, data, and loss of one benchmark."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gpt, self.ready = name not in ("mlp", "batches", "watches"), name == "batches"
        if self.gpt:
            task = BytesGPT(width=192, depth=4, heads=3)
            self.make_model, self.data = task.model, task.train_data()
            self.options = ["precision=bf16"] + ["strategy=fsdp"] * (name == "fsdp")
        else:  # so small that the time is that of the loop itself
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(10, (100_000,), generator=generator)
            self.data: Any = TensorDataset(torch.randn(100_000, 64, generator=generator), labels)
            if self.ready:
                self.data = [*zip(*(column.split(32) for column in self.data.tensors), strict=True)]
            self.make_model = lambda: nn.Sequential(
                nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
            )
            self.options = ["precision=fp32"] + ["strategy=fsdp"] * (name == "watches")

    def loss(self, model: Callable[..., Tensor], batch: Any) -> tuple[Tensor, int]:
        """Return (loss sum, items) of a micro-batch."""
        if self.gpt:
            tokens = batch.long()
            targets = tokens[:, 1:].flatten()
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
        else:
            inputs, targets = batch
            logits = model(inputs)
        return functional.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def new_model(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.make_model()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def by_hand(case: Case, plan: RunPlan) -> Generator[float]:
    """Run a minimal hand-written loop; yield after each optimizer step."""
    raw, optimizer = new_model(case)
    sharded = case.name == "fsdp"
    model: Any = raw
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, raw):
            fully_shard(module, mp_policy=policy)
        model.set_reshard_after_forward(False)
        optimizer = torch.optim.AdamW(raw.parameters(), 1e-3)
    else:
        model = DistributedDataParallel(raw, gradient_as_bucket_view=True)
    accumulation = plan.batch.accumulation
    sampler: Any = DistributedSampler(case.data)
    loader = (case.data[index] for _ in itertools.count() for index in sampler) if case.ready else DataLoader(
        case.data, plan.batch.micro_size, sampler=sampler, num_workers=plan.train.loader_workers,
        prefetch_factor=2 * accumulation if plan.train.loader_workers else None,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: plan.schedule.factor(step, plan.train.steps))
    bf16 = "precision=bf16" in case.options
    batches = (batch for _ in itertools.count() for batch in loader)
    while True:
        loss_sum = torch.zeros(())
        for micro in range(accumulation):
            batch = next(batches)
            last = micro == accumulation - 1
            if sharded:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            with nullcontext() if last or sharded else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16) if bf16 and not sharded else nullcontext():
                    total, items = case.loss(model, batch)
                    loss = total / items / accumulation
                loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)  # the logged loss is the mean over the ranks
        yield loss_sum.item() / dist.get_world_size()


def by_engine(case: Case, plan: RunPlan, directory: Path, *, without: str | None = None) -> Generator[float]:
    """Train with the engine; yield after each optimizer step. ``without``: one of PARTS."""
    model, optimizer = new_model(case)
    with mock.patch.object(LostWrites, "_watch") if without == "watches" else nullcontext():
        engine = Engine(model, optimizer, plan)
    if without == "watches":
        engine._watches.clear()
        cast("Fsdp", engine.parallel)._order.counts = False
    if without == "meter":
        engine.parallel.meter = cast("Any", Unmetered())
    if without == "noise":
        engine.noise_scale.before_backward = lambda *_, **__: None  # so that no norm is ever due
    start = time.perf_counter()
    writes = engine.world.rank == 0 and not case.ready  # a loop of the user's own has a record once it calls resume()
    record = Record(directory / "metrics.jsonl", wait_for_space=False) if writes else None
    for window in engine.windows(case.data, collate=(lambda samples: samples[0]) if case.ready else None):
        for batch in window:
            engine.backward(*case.loss(engine.model, batch))
        result = engine.step()
        if record:
            counts, total_s = (engine.samples, engine.items), time.perf_counter() - start
            metrics = step_metrics(result, plan, counts, total_s) | engine.metrics()
            record.write(result.step, metrics | peak_memory(engine.device))
        yield result.loss


class Unmetered:
    """Replacement of the meter that counts and times nothing."""

    waited_s = 0.0

    def stop(self) -> None: ...
    def reduction_started(self) -> None: ...
    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    reducing = waiting

    def open_window(self) -> None: ...
    def check(self, *_: object) -> None: ...
    def count(self, *_: object, **__: object) -> None: ...

    def start_timer(self) -> Unmetered:
        return self

    def close_window(self, *_: object) -> CommStats:
        return CommStats({}, 0, 0.0)


def compare(case: Case, steps: int, loader_workers: int) -> str:
    """Return a line with the medians of ``steps`` measured steps of both loops."""
    without = case.name if case.name in PARTS else None
    # short steps, in which small costs are visible, for the MLP, the meter and the noise scale
    sizes = {"mlp": (512, 32), "watches": (512, 32), "batches": (16, 1), "meter": (16, 1), "noise": (16, 1)}
    global_size, micro_size = sizes.get(case.name, (64, 4))
    options = [
        *case.options, f"batch.global_size={global_size}", f"batch.micro_size={micro_size}", "cluster.device=cpu",
        f"train.loader_workers={0 if case.ready else loader_workers}", f"train.steps={10**9}", "run.calibrate_s=0",
    ]  # fmt: skip
    plan = make_plan(options, samples=len(case.data))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        other = by_engine(case, plan, directory, without=without) if without else by_hand(case, plan)
        loops = {"engine": by_engine(case, plan, directory), "other": other}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for step in range(WARM_UP + steps):
            for name in sorted(loops, reverse=bool(step % 2)):  # alternate, so that neither always has warm caches
                dist.barrier()
                start = time.perf_counter()
                next(loops[name])
                if step >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
        for loop in loops.values():
            loop.close()
    other_ms, engine_ms = (statistics.median(times[name]) * 1e3 for name in ("other", "engine"))
    paired = statistics.median(a / b for a, b in zip(times["engine"], times["other"], strict=True))
    other_name = f"{without} off" if without else "hand-written"
    return (
        f"{case.name:<10} {other_name:<12} {other_ms:9.3f} ms   engine {engine_ms:9.3f} ms   "
        f"ratio {engine_ms / other_ms:.3f}   paired {paired:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="measured steps of each loop; default: 60, and 1000 of the MLP")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--loader-workers", type=int, default=1, help="loader processes a rank, in both loops")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for name in arguments.case or CASES:
        steps = arguments.steps or {"mlp": 1000, "batches": 1000, "watches": 1000, "meter": 200, "noise": 200}.get(
            name, 60
        )
        line = compare(Case(name), steps, arguments.loader_workers)
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
