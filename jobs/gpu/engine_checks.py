"""Checks of the GPU acceptance that drive the engine in their own process: host syncs, throughput, memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

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
    from launcher.config.schema import StrategyKind
    from launcher.train.engine import build
    from launcher.train.parallel.ddp import Ddp

    plan, _ = _plan(environment, *overrides)
    task = Words(width=width, depth=depth, length=LENGTH, samples=plan.task.samples)
    rows = torch.randint(1, WORDS, (64, LENGTH))
    data = [rows[n % len(rows)] for n in range(plan.task.samples)]
    torch.manual_seed(0)

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, 1e-4, fused=environment.on_gpu)

    with ExitStack() as patches:
        if plan.strategy.kind is StrategyKind.ddp:  # which a world of one rank trains without
            always = partial(Ddp, compiled=False)
            patches.enter_context(mock.patch.object(build, "Parallel", always))
        engine = Engine(task.model, optimizer, plan, shard_units=task.shard_units)
    if plan.strategy.kind is StrategyKind.ddp:
        meter = engine.parallel.meter
        meter.layout = dataclasses.replace(meter.layout, replicas=2)  # so that it expects an all-reduce
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
        mode("error" if counted else "default")
        for _ in _micro_batches(engine, task, window):
            pass
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
    check(f"host syncs, {_strategy}, {_precision}", f"0 in a micro-batch, {_limit} a step")(
        partial(_syncs, strategy=_strategy, precision=_precision, limit=_limit)
    )


def plain_loop(
    environment: Environment, task: Any, batches: list[Any], items: int, strategy: str, precision: str
) -> Callable[[], None]:
    """Return a function that trains one window of ``batches`` as torch's tutorials do, without the launcher.

    Gradients are reduced in the last micro-batch only. DDP and ``fully_shard`` have torch's defaults.

    Args:
        items: number of items of a window.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    device, narrow = torch.device(environment.device), precision == "bf16"
    model: Any = task.model().to(device)
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} if narrow else {}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    elif strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    adamw = torch.optim.AdamW(model.parameters(), 1e-4, fused=environment.on_gpu)
    batches = [batch.pin_memory() for batch in batches] if environment.on_gpu else batches

    def window() -> None:
        losses = list[Any]()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if strategy == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if strategy == "ddp" and not last else nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                    loss = task.loss(model, batch.to(device, non_blocking=True))
                (loss.total / items).backward()
            losses.append(loss.total.detach())
        clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        torch.stack(losses).sum().item()

    return window


def seconds_of(environment: Environment, windows: int, *loops: Callable[[], None]) -> list[float]:
    """Return the median seconds of a window of each of ``loops``, which run in turns."""
    import torch

    times: list[list[float]] = [[] for _ in loops]
    for number in range(WARM_UP + windows):
        for run, taken in zip(loops, times, strict=True):
            start = time.perf_counter()
            run()
            if environment.on_gpu:
                torch.cuda.synchronize()
            if number >= WARM_UP:
                taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]


def _throughput(environment: Environment, strategy: str) -> str:
    """Compare windows of the engine with those of a plain loop, in turns, for a model of 200 million parameters."""
    import torch

    from jobs.gpu.tasks import WORDS

    width, depth = (2048, 6) if environment.on_gpu else (32, 1)
    precision = "bf16" if environment.on_gpu else "fp32"
    engine, task, windows = _engine(environment, width, depth, f"strategy={strategy}", f"precision={precision}")
    rows = torch.randint(1, WORDS, (ACCUMULATION, MICRO, LENGTH))
    items = rows.numel() - MICRO * ACCUMULATION
    plain = plain_loop(environment, task, [*rows], items, strategy, precision)

    def window() -> None:
        for _ in _micro_batches(engine, task, next(windows)):
            pass
        engine.step()

    window_s, plain_s = seconds_of(environment, 25 if environment.on_gpu else 1, window, plain)
    millions = sum(parameter.numel() for parameter in engine.model.parameters()) / 1e6
    text = f"{plain_s / window_s:.3f} of a plain loop, {1e3 * window_s:.1f} ms a window, {millions:.0f} M parameters"
    if environment.on_gpu and plain_s / window_s < 0.97:
        for name, run in (("engine", window), ("plain", plain)):
            with torch.profiler.profile() as profiled:
                run()
                torch.cuda.synchronize()
            print(name, profiled.key_averages().table(sort_by="cuda_time_total", row_limit=40))
        raise AssertionError(text)
    return text


for _strategy in ("single", "ddp", "fsdp"):
    check(f"throughput, {_strategy}", "0.97 of a plain loop", alone=True)(partial(_throughput, strategy=_strategy))


@check("idle before the optimizer", "1 ms", alone=True)
def idle(environment: Environment) -> str:
    """Check that the GPU hardly waits between a window's last backward kernel and the optimizer's first."""
    import torch

    need_cuda(environment)
    engine, task, windows = _engine(environment, 2048, 6, "strategy=single", "precision=bf16")

    def train(count: int) -> None:
        for _ in range(count):
            for _ in _micro_batches(engine, task, next(windows)):
                pass
            engine.step()
        torch.cuda.synchronize()

    train(WARM_UP)
    with torch.profiler.profile():  # the first profile starts CUPTI
        train(1)
    with torch.profiler.profile() as profiled:
        train(3)
    trace = environment.folder / "trace.json"
    profiled.export_chrome_trace(str(trace))
    found = idle_us(json.loads(trace.read_text())["traceEvents"])
    if len(found) != 3:
        raise AssertionError(f"the trace of 3 windows has {len(found)} optimizer steps")
    text = f"{median(found) / 1e3:.2f} ms, most {max(found) / 1e3:.2f} ms"
    if median(found) > 1e3:
        raise AssertionError(text)
    return text


def idle_us(events: list[dict[str, Any]]) -> list[float]:
    """Return for each optimizer step of a trace the microseconds in which the GPU was idle between the last kernel of a
    backward pass and the first of the optimizer.

    Autograd launches the kernels of a backward pass from a thread of its own.
    """
    threads = {
        event["args"]["correlation"]: event["tid"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    kernels = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memset")), key=lambda e: e["ts"])
    thread_of = [threads.get(kernel.get("args", {}).get("correlation")) for kernel in kernels]
    of_optimizer = ["FusedAdam" in kernel["name"] for kernel in kernels]
    main = next((thread for thread, is_adam in zip(thread_of, of_optimizer, strict=True) if is_adam), None)
    found = list[float]()
    after_backward, busy_until, waited = False, 0.0, 0.0
    for kernel, thread, is_adam in zip(kernels, thread_of, of_optimizer, strict=True):
        end = kernel["ts"] + kernel["dur"]
        if thread is not None and thread != main:
            after_backward, busy_until, waited = True, end, 0.0
        elif after_backward:
            waited += max(0.0, kernel["ts"] - busy_until)
            busy_until = max(busy_until, end)
            if is_adam:
                found.append(waited)
                after_backward = False
    return found


@check("refused page-lock", "a right copy, then a kernel")
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


@check("visible GPUs", "torch's count")
def visible(environment: Environment) -> str:
    """Compare the launcher's count of GPUs with CUDA's for the values of CUDA_VISIBLE_DEVICES that users have."""
    import torch

    from launcher.plan.host import visible_gpus

    values = [None, "", "-1", "0", "0,7", "NoDevFiles", "void"]
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


@check("memory of the calibration", "30% of the gradients", alone=True)
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
