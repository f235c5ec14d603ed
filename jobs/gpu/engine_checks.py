"""Checks of the GPU acceptance that drive the engine in their own process: host syncs, throughput, failures, saves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from jobs.gpu.direct import joined
from jobs.gpu.registry import Environment, check, need_cuda

ACCUMULATION, MICRO, LENGTH = 8, 8, 512
# windows before the counted ones: the first try the loss and build the optimizer's state
WARM_UP = 4


def _plan(environment: Environment, *overrides: str) -> tuple[Any, Any]:
    global_size = ACCUMULATION * MICRO
    shape = (f"batch.global_size={global_size}", f"batch.micro_size={MICRO}", "train.steps=400", "run.calibrate_s=0")
    return joined(environment, *shape, "optimizer.lr=1e-4", *overrides, samples=400 * global_size)


def _engine(environment: Environment, width: int, depth: int, *overrides: str) -> tuple[Any, Any, Any]:
    """Return an engine, its task, and the iterator over its windows, for sentences of LENGTH words."""
    import torch

    from jobs.gpu.tasks import WORDS, Words
    from launcher import Engine

    plan, _ = _plan(environment, *overrides)
    task = Words(width=width, depth=depth, length=LENGTH, samples=plan.task.samples)
    rows = torch.randint(1, WORDS, (64, LENGTH))
    data = [rows[n % len(rows)] for n in range(plan.task.samples)]
    torch.manual_seed(0)

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, 1e-4, fused=environment.on_gpu)

    engine = Engine(task.model, optimizer, plan, shard_units=task.shard_units)
    return engine, task, iter(engine.windows(data, torch.stack))


def _micro_batches(engine: Any, task: Any, window: Any) -> Iterator[None]:
    for batch in window:
        loss = task.loss(engine.model, batch)
        engine.backward(loss.total, loss.items)
        yield


def _syncs(environment: Environment, strategy: str, precision: str, limit: int) -> str:
    """Check that no micro-batch makes the host wait for the GPU, and count how often a step does."""
    import torch

    if precision == "fp16":
        need_cuda(environment)
    engine, task, windows = _engine(environment, 256, 2, f"strategy={strategy}", f"precision={precision}")
    counts, where = list[int](), set[str]()
    mode = torch.cuda.set_sync_debug_mode if environment.on_gpu else lambda _: None
    for number in range(WARM_UP + 6):
        window, counted = next(windows), number >= WARM_UP and environment.on_gpu
        for _ in _micro_batches(engine, task, window):
            mode("error" if counted else "default")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            mode("warn" if counted else "default")
            engine.step()
            mode("default")
        found = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
        where |= {f"{Path(each.filename).name}:{each.lineno}" for each in found}
        counts += [len(found)] * counted
    # one more in a window whose parameters are compared, which is rare
    if counts and (median(counts) > limit or max(counts) > limit + 1):
        raise AssertionError(f"{counts} syncs a step, more than {limit}: {', '.join(sorted(where))}")
    return f"none in a micro-batch, {max(counts, default=0)} a step (limit {limit}): {', '.join(sorted(where))}"


for _strategy, _precision, _limit in (("single", "bf16", 2), ("single", "fp16", 4), ("fsdp", "bf16", 2)):
    check(f"host syncs, {_strategy}, {_precision}")(
        partial(_syncs, strategy=_strategy, precision=_precision, limit=_limit)
    )


def _throughput(environment: Environment, strategy: str) -> str:
    """Compare windows of the engine with those of a plain loop, in turns, for a model of 200 million parameters.

    The plain loop shards as torch documents it, and reduces gradients in the last micro-batch only.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.utils import clip_grad_norm_
    from torch.profiler import profile

    from jobs.gpu.tasks import WORDS

    width, depth = (2048, 6) if environment.on_gpu else (32, 1)
    precision = "bf16" if environment.on_gpu else "fp32"
    engine, task, windows = _engine(environment, width, depth, f"strategy={strategy}", f"precision={precision}")
    device = torch.device(environment.device)
    plain: Any = task.model().to(device)
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if precision == "bf16" else {}
        for block in plain.blocks:
            fully_shard(block, **options)
        fully_shard(plain, **options)
    adamw = torch.optim.AdamW(plain.parameters(), 1e-4, fused=environment.on_gpu)
    rows = torch.randint(1, WORDS, (ACCUMULATION, MICRO, LENGTH))
    rows = rows.pin_memory() if environment.on_gpu else rows
    times: dict[str, list[float]] = {"engine": [], "plain": []}

    def with_engine() -> None:
        for _ in _micro_batches(engine, task, next(windows)):
            pass
        engine.step()

    def with_plain_loop() -> None:
        losses = list[Any]()
        for number, row in enumerate(rows):
            batch = row.to(device, non_blocking=True)
            if strategy == "fsdp":
                plain.set_requires_gradient_sync(number == ACCUMULATION - 1)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = task.loss(plain, batch)
            (loss.total / (MICRO * ACCUMULATION * (LENGTH - 1))).backward()
            losses.append(loss.total.detach())
        clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        torch.stack(losses).sum().item()

    for number in range(WARM_UP + (25 if environment.on_gpu else 2)):
        for name, run in (("engine", with_engine), ("plain", with_plain_loop)):
            start = time.perf_counter()
            run()
            if environment.on_gpu:
                torch.cuda.synchronize()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    ratio = median(times["plain"]) / median(times["engine"])
    millions = sum(parameter.numel() for parameter in plain.parameters()) / 1e6
    text = f"{ratio:.3f} of a plain loop, {1e3 * median(times['engine']):.1f} ms a window, {millions:.0f} M parameters"
    if environment.on_gpu and ratio < 0.97:
        for name, run in (("engine", with_engine), ("plain", with_plain_loop)):
            with profile() as profiled:
                run()
                torch.cuda.synchronize()
            print(
                name, profiled.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60)
            )
        raise AssertionError(text)
    return text


for _strategy in ("single", "ddp", "fsdp"):
    check(f"throughput, {_strategy}, world 1", alone=True)(partial(_throughput, strategy=_strategy))


@check("failure to verdict, 2 ranks", seconds=120)
def verdict(environment: Environment) -> str:
    """Check that a rank blocked in a kernel is killed soon after its peer has failed."""
    mark = environment.folder / "raised"
    job = ("strategy=ddp", "precision=fp32", "batch.micro_size=3", "task.trouble=raises", f"task.marks={mark.parent}")
    output = environment.train(*job, workers=2, status=1)
    took_s = time.time() - mark.stat().st_mtime
    if "rank 0" not in output or "trouble of this check" not in output:
        raise AssertionError("the output does not name the rank that failed and its error")
    if environment.on_gpu and took_s > 10:
        raise AssertionError(f"{took_s:.1f} s from the failure to the end of `launch train`")
    return f"{took_s:.1f} s from the failure to the end of `launch train`"


@check("failing rank ends")
def nccl_failure(environment: Environment) -> str:
    """Check that a rank that fails with a kernel in flight and an NCCL communicator alive is soon gone."""
    mark = environment.folder / "raised"
    job = ("strategy=fsdp", "precision=fp32", "batch.micro_size=3", "task.trouble=raises", f"task.marks={mark.parent}")
    environment.train(*job, status=1)
    took_s = time.time() - mark.stat().st_mtime
    if environment.on_gpu and took_s > 8:
        raise AssertionError(f"{took_s:.1f} s from the failure to the end of `launch train`")
    return f"{took_s:.1f} s from the failure to the end of `launch train`"


@check("refused page-lock")
def refused_page_lock(environment: Environment) -> str:
    """Check that a kernel after a refused page-lock works, with a refusal by the driver itself."""
    import torch

    from launcher.train.checkpoint import contents

    need_cuda(environment)
    device = torch.device("cuda", 0)
    contents._PORTABLE = 0x100  # no flag of cudaHostRegister: the driver refuses
    value = torch.randn(1000, device=device)
    copied = contents.Staging(device).copy({"value": value})
    torch.ones(10, device=device).sum().item()
    if copied["value"].is_pinned() or not torch.equal(copied["value"], value.cpu()):
        raise AssertionError("the copy is page-locked, or wrong")
    return "the copy is right, and the next kernel works"


@check("visible GPUs")
def visible(environment: Environment) -> str:
    """Compare the launcher's count of GPUs with CUDA's for the values of CUDA_VISIBLE_DEVICES that users have."""
    import torch

    from launcher.plan.host import visible_gpus

    values = [None, "", "-1", "0", "0,7", "0,-1", "NoDevFiles", "void", "none", "all", "0,void"]
    if environment.on_gpu:
        values.append(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    code = "import torch; print(torch.cuda.device_count())"
    differing = list[str]()
    for value in values:
        env = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env |= {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        if visible_gpus(env) != int(done.stdout):
            differing.append(f"{value!r}: {visible_gpus(env)}, torch {done.stdout.strip()}")
    if differing:
        raise AssertionError("; ".join(differing))
    return f"as torch counts for {len(values)} values"


@check("memory of the calibration", alone=True)
def calibration_memory(environment: Environment) -> str:
    """Compare the memory peak of passes that are undone, as calibration makes them, with that of a run's windows."""
    import torch
    import torch.distributed as dist

    from jobs.gpu.tasks import Words
    from launcher.config.schema import Sync
    from launcher.train.parallel.ddp import Ddp

    need_cuda(environment)
    plan, device = joined(environment, "strategy=ddp", "strategy.sync=boundary")
    task = Words(width=2048, depth=2)
    parallel, data = Ddp(task.model().to(device), plan, device, compiled=False), task.train_data()
    batch = task.collate([data[n] for n in range(4)]).to(device)

    def window() -> None:
        parallel.begin_window()
        for last in (False, True):
            with parallel.micro_batch(Sync.boundary, first=not last, last=last):
                loss = task.loss(parallel.module, batch).total
                with parallel.backward(loss):
                    loss.backward()
        parallel.gradients()
        parallel.zero_grad()

    def peak(undone: bool) -> int:
        torch.cuda.synchronize()
        time.sleep(0.5)  # NCCL keeps the buckets of a reducer until its watchdog has seen the all-reduce end,
        dist.all_reduce(torch.zeros(1, device=device))  # and frees them in the next collective
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with parallel.without_effects() if undone else nullcontext():
            window()
            torch.cuda.synchronize()
            time.sleep(0.5)
            dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    plain, calibrated = (max(peak(undone) for _ in range(3)) for undone in (False, True))
    gradients = sum(parameter.nbytes for parameter in parallel.module.parameters())
    more = (calibrated - plain) / gradients
    text = f"{calibrated / 2**20:.0f} MiB, {plain / 2**20:.0f} MiB in a window: {more:.0%} of the gradients more"
    if more > 0.3:
        raise AssertionError(text)
    return text
