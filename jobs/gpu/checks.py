"""Checks of the GPU acceptance that run `launch ...` like a user, and read the run's record."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from jobs.gpu.engine_checks import plain_loop, seconds_of
from jobs.gpu.registry import GLOBAL, ROOT, STEPS, Environment, Skip, check, missing_compiler, need_cuda

# limit on the relative distance between a logged loss and that of a plain loop over big batches in the same precision
LOSS_WITHIN = {"fp32": 2e-4, "bf16": 2e-2, "fp16": 5e-3}


def plain_losses(environment: Environment) -> list[float]:
    """Return the loss of each window of the run from a loop without the launcher: one big batch, autocast, AdamW."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    from launcher.plan.run_plan import RunPlan
    from launcher.task import load_task, seed_everything
    from launcher.train.data.randomness import Permutation

    plan = RunPlan.load(environment.run / "plan.json")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision.kind.value)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    seed_everything(plan.train.seed)
    task: Any = load_task(plan.task.target, plan.task.params, [str(ROOT)])
    model = task.model().to(environment.device)
    data, optimizer = task.train_data(), plan.optimizer
    betas = (optimizer.betas[0], optimizer.betas[1])
    vectors, others = ([p for p in model.parameters() if (p.ndim < 2) is narrow] for narrow in (True, False))
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
    adamw = torch.optim.AdamW(groups, optimizer.lr, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
    order, losses = Permutation(len(data), plan.train.seed, 0), list[float]()
    for step in range(STEPS):
        batch = task.collate([data[i] for i in order.take(step * GLOBAL, GLOBAL)])
        batch = (batch["words"] if isinstance(batch, dict) else batch).to(environment.device)
        with torch.autocast(environment.device, dtype, enabled=dtype is not None):
            loss = task.loss(model, batch)
        mean = loss.total / loss.items
        mean.backward()
        assert plan.train.clip_norm is not None
        clip_grad_norm_(model.parameters(), plan.train.clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(mean.item())
    return losses


def compare_with_plain(environment: Environment, precision: str) -> str:
    losses, expected = [record["train/loss"] for record in environment.records()], plain_losses(environment)
    if len(losses) != STEPS:
        raise AssertionError(f"{len(losses)} steps were recorded, not {STEPS}")
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    if not worst <= LOSS_WITHIN[precision]:
        raise AssertionError(f"losses {losses} differ from a plain loop's {expected} by {worst:.2g}")
    return f"loss within {worst:.1e} of a plain loop"


def _curves() -> Iterator[tuple[str, str, int, str, tuple[str, ...]]]:
    """Yield name, strategy, workers, precision and overrides of each run whose losses a plain loop reproduces."""
    for precision in ("fp32", "bf16", "fp16"):
        yield f"single {precision}", "single", 1, precision, ("batch.micro_size=4",)
    yield "ddp, 2 ranks, fp32", "ddp", 2, "fp32", ("batch.micro_size=3",)
    yield "fsdp, 2 ranks, fp32", "fsdp", 2, "fp32", ("batch.micro_size=3",)
    yield "hsdp, 4 ranks, fp32", "hsdp", 4, "fp32", ("batch.micro_size=3", "strategy.shard_size=2")
    once = ("batch.micro_size=3", "strategy.sync=gather_once")
    yield "fsdp, 2 ranks, gather_once, bf16", "fsdp", 2, "bf16", once
    offload = ("batch.micro_size=3", "strategy.cpu_offload=true")
    yield "cpu_offload, fp16, 2 ranks", "fsdp", 2, "fp16", offload
    yield "recompute, fsdp, bf16", "fsdp", 1, "bf16", ("batch.micro_size=4", "strategy.recompute=blocks")
    yield "compress=bf16, 2 ranks", "ddp", 2, "bf16", ("batch.micro_size=3", "strategy.compress=bf16")
    window = ("batch.micro_size=3", "batch.norm=window", "task._target_=jobs.gpu.tasks.Normalised")
    yield "BatchNorm over the window, 2 ranks", "ddp", 2, "fp32", window
    nested = ("batch.micro_size=4", "task._target_=jobs.gpu.tasks.Nested")
    yield "batches of every type", "single", 1, "fp32", nested
    yield "deterministic", "single", 1, "fp32", ("batch.micro_size=4", "train.deterministic=true")
    yield "eight loader processes", "single", 1, "fp32", ("batch.micro_size=4", "train.loader_workers=8")


def _curve(environment: Environment, strategy: str, workers: int, precision: str, overrides: tuple[str, ...]) -> str:
    if "strategy.cpu_offload=true" in overrides:
        need_cuda(environment)
    environment.train(f"strategy={strategy}", f"precision={precision}", *overrides, workers=workers)
    return compare_with_plain(environment, precision)


for _name, _strategy, _workers, _precision, _options in _curves():
    check(_name, f"losses within {LOSS_WITHIN[_precision]:g} of a plain loop")(
        partial(_curve, strategy=_strategy, workers=_workers, precision=_precision, overrides=_options)
    )


def tensors(directory: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from launcher.train.checkpoint.file_format import Reader

    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in Reader(directory).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


@check("resume, bit by bit", "equal tensors", seconds=150)
def resume(environment: Environment) -> str:
    """Compare a run that dies after an asynchronous save and is resumed with one that does not die."""
    import torch

    job = (
        "strategy=single", "precision=bf16", "batch.micro_size=4", "task.dropout=0.1", "checkpoint.every=2",
        "train.deterministic=true", f"task.marks={environment.folder}",
    )  # fmt: skip
    environment.train(*job, "run.name=whole")
    environment.train(*job, "task.trouble=dies", f"task.after={5 * GLOBAL // 4}", status=1)
    before = sorted(path.name for path in (environment.run / "checkpoints").glob("step_*"))
    if not before or f"step_{STEPS:06}" in before:
        raise AssertionError(f"checkpoints when it died: {before}")
    environment.launch("resume", str(environment.run))
    whole = environment.run.with_name("whole")
    resumed, expected = (tensors(run / "checkpoints" / f"step_{STEPS:06}") for run in (environment.run, whole))
    different = [name for name in expected if not torch.equal(resumed[name], expected[name])]
    if resumed.keys() != expected.keys() or different:
        raise AssertionError(f"other values after resume: {different[:5]}")
    return f"{len(expected)} tensors equal, resumed from {before[-1]}"


@check("async saves, bit by bit", "as saved at once", seconds=120)
def saves(environment: Environment) -> str:
    """Compare checkpoints that are written while training changes the state with those of a run that waits for each."""
    import torch

    job = (
        "task.width=512", "task.depth=4", "batch.micro_size=4", "precision=bf16", "strategy=fsdp", "checkpoint.every=1",
        "checkpoint.keep=null", "train.deterministic=true",
    )  # fmt: skip
    environment.train(*job, "run.name=waiting", "checkpoint.async_save=false")
    environment.train(*job)
    saved = environment.run / "checkpoints"
    steps = sorted(path.name for path in saved.glob("step_*"))
    if steps != [f"step_{step:06}" for step in range(1, STEPS + 1)]:
        raise AssertionError(f"checkpoints: {steps}")
    compared = 0
    for step in steps:
        expected, found = (
            tensors(run / "checkpoints" / step) for run in (environment.run.with_name("waiting"), environment.run)
        )
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        if found.keys() != expected.keys() or different:
            raise AssertionError(f"{step} has other values: {different[:5]}")
        compared += len(expected)
    stalls = [record["time/checkpoint_s"] for record in environment.records() if "time/checkpoint_s" in record]
    return f"{compared} tensors equal; each save delays a step by {1e3 * median(stalls):.0f} ms (median)"


@check("shrink, one of 2 ranks", "losses within 0.0002 of a plain loop", seconds=150)
def shrink(environment: Environment) -> str:
    """Check that both ranks shrink when one has no memory: 12 samples of 100 MB do not fit into 1 GB, 6 do."""
    need_cuda(environment)
    job = ("strategy=ddp", "precision=fp32", "task.megabytes=100", "task.room=1000", "task.room_rank=1")
    environment.train(*job, "batch.micro_size=12", "batch.on_oom=shrink", workers=2)
    sizes = [(record["batch/micro_size"], record["batch/accumulation"]) for record in environment.records()]
    if any(micro > 6 or 2 * micro * accumulation != GLOBAL for micro, accumulation in sizes):
        raise AssertionError(f"micro-batches and accumulation: {sizes}")
    if "out of memory. Continuing with" not in environment.log():
        raise AssertionError("the log does not mention the smaller micro-batches")
    return f"12 -> {sizes[-1][0]:.0f} samples in place; {compare_with_plain_of(environment)}"


@check("one rank out of memory in FSDP's calibration", "not measured, then an error that names it", seconds=90)
def calibration_out_of_memory(environment: Environment) -> str:
    """Check that the ranks agree not to gather the parameters, 537 MB, where one has no room beside its 268 MB."""
    need_cuda(environment)
    job = ("strategy=fsdp", "precision=fp32", "strategy.sync=gather_once", "task.width=1024", "task.depth=16")
    room = ("task.room=700", "task.room_rank=1", "batch.micro_size=3", "train.hang_timeout=60")
    task = "task._target_=jobs.gpu.tasks.Unevaluated"  # an evaluation would gather all parameters first
    output = " ".join(environment.train(*job, *room, task, workers=2, status=1).split())
    if "The gathered parameters do not fit into memory" not in environment.log():
        raise AssertionError("the ranks did not agree that the parameters do not fit")
    if "out of memory" not in output or "rank 1" not in output.lower():
        raise AssertionError("the output does not name the rank that ran out of memory")
    return "both ranks know before they gather; then the training names rank 1"


def compare_with_plain_of(environment: Environment) -> str:
    """Compare as in ``compare_with_plain`` for a task that needs more memory than a big batch may use."""
    plan = json.loads((environment.run / "plan.json").read_text())
    plan["task"]["params"] |= {"megabytes": 0, "room": 0}
    (environment.run / "plan.json").write_text(json.dumps(plan))
    return compare_with_plain(environment, "fp32")


@check("micro_size=auto", "6 to 12 samples", seconds=150)
def auto_micro(environment: Environment) -> str:
    need_cuda(environment)
    job = ("strategy=single", "precision=fp32", "task.megabytes=100", "task.room=1500", "batch.micro_size=auto")
    environment.train(*job)
    sizes = {record["batch/micro_size"] for record in environment.records()}
    if len(sizes) != 1 or not 6 <= min(sizes) <= 12:
        raise AssertionError(f"micro-batches {sizes}: 12 samples fit, 24 do not")
    return f"chose {min(sizes):.0f}; {compare_with_plain_of(environment)}"


@check("memory snapshot", "a snapshot, and kernels in the trace", seconds=150)
def memory_snapshot(environment: Environment) -> str:
    need_cuda(environment)
    job = ("strategy=single", "precision=fp32", "task.megabytes=100", "task.room=1500")
    callbacks = "{_target_: MemorySnapshot},{_target_: Profile, steps: [2]}"
    environment.train(*job, "batch.micro_size=24", "batch.on_oom=shrink", f"callbacks=[{callbacks}]")
    found = [*(environment.run / "memory").glob("step_*.rank0.pickle")]
    if not found or not found[0].stat().st_size:
        raise AssertionError("a rank ran out of memory, and there is no snapshot")
    kernels = sum(event.get("cat") == "kernel" for event in _trace(environment, 2))
    if not kernels:
        raise AssertionError("the trace of step 2 has no kernel of the GPU")
    return f"{found[0].stat().st_size} bytes in {found[0].name}; {kernels} kernels in the trace of step 2"


def _trace(environment: Environment, step: int) -> list[dict[str, Any]]:
    return json.loads((environment.run / "traces" / f"step_{step:06d}.rank0.json").read_text())["traceEvents"]


@check("out of memory in a collective: restart", "losses within 0.0002 of a plain loop", seconds=180)
def restart(environment: Environment) -> str:
    need_cuda(environment)
    job = ("strategy=fsdp", "precision=fp32", "task.megabytes=150", "task.room=1500", "checkpoint.every=1")
    environment.train(*job, "batch.micro_size=12", "batch.on_oom=shrink", workers=2)
    sizes = [record["batch/micro_size"] for record in environment.records()]
    if sizes[-1] > 6 or "restarted" not in environment.events():
        raise AssertionError(f"micro-batches of {sizes}: 12 samples do not fit; events: {environment.events()}")
    return f"micro-batches {sizes[0]:.0f} to {sizes[-1]:.0f}; {compare_with_plain_of(environment)}"


@check("compile without recompiles", "no compilation after step 2", seconds=180)
def compiled(environment: Environment) -> str:
    if lacking := missing_compiler(environment):
        raise Skip(lacking)
    report = environment.folder / "report"
    job = ("strategy=fsdp", "strategy.recompute=blocks", "precision=bf16", "batch.micro_size=4", "train.compile=true")
    reported = ("task._target_=jobs.gpu.tasks.Reported", f"task.report={report}", "train.eval_every=0")
    environment.train(*job, *reported)
    frames = [int(line.split()[1]) for line in report.read_text().splitlines()]
    later = frames[-(STEPS - 2) * GLOBAL // 4 :]
    if not later[0] or later[0] != later[-1]:
        raise AssertionError(f"compiled frames after each micro-batch: {frames}")
    return f"{later[-1]} frames compiled; {compare_with_plain(environment, 'bf16')}"


@check("PowerSGD, 2 ranks", "losses within 30% of a plain loop, half the bytes", seconds=120)
def powersgd(environment: Environment) -> str:
    job = ("strategy=ddp", "strategy.compress=powersgd", "powersgd.start=2", "powersgd.rank=4", "task.width=128")
    environment.train(*job, "precision=fp32", "batch.micro_size=3", workers=2)
    first, last = (environment.records()[step]["comm/wire_bytes"] for step in (0, -1))
    losses, expected = [record["train/loss"] for record in environment.records()], plain_losses(environment)
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    text = f"{last} bytes after {first}, losses within {worst:.1%} of a plain loop"
    if not last < first / 2 or not worst < 0.3:
        raise AssertionError(text)
    return text


@check("initial values of 1 B parameters", "no hang verdict in 30 s without a beat of the loop", seconds=240)
def initial_values(environment: Environment) -> str:
    """Check that drawing values for longer than hang_timeout on rank 0, while rank 1 waits, is not taken for a hang."""
    need_cuda(environment)
    start = time.monotonic()
    job = ("strategy=fsdp", "precision=bf16", "task.width=4096", "task.depth=7", "batch.micro_size=12", "train.steps=1")
    slow = ("task._target_=jobs.gpu.tasks.SlowlyDrawn", "task.drawing_s=30")
    short = ("train.hang_timeout=20", "cluster.grace_s=5", "run.calibrate_s=0", "train.eval_every=0")
    environment.train(*job, *slow, *short, "checkpoint.enabled=false", workers=2)
    return f"{len(environment.records())} step after {time.monotonic() - start:.0f} s in all"


def _arithmetic(environment: Environment, tf32: bool) -> dict[str, float]:
    report = environment.folder / f"tf32-{tf32}"
    words = ("precision.tf32=true",) if tf32 else ()
    job = ("strategy=single", "precision=fp32", "batch.micro_size=4", "task._target_=jobs.gpu.tasks.Arithmetic")
    environment.train(*job, f"task.report={report}", f"run.name={report.name}", *words)
    return {name: float(error) for name, error in (line.split() for line in report.read_text().splitlines())}


@check("fp32 and TF32", "relative error below 1e-5, above 5e-5")
def arithmetic(environment: Environment) -> str:
    import torch

    errors = _arithmetic(environment, tf32=False)
    if not max(errors.values()) < 1e-5:
        raise AssertionError(f"relative errors {errors}: that is TF32")
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    if not environment.on_gpu or torch.cuda.get_device_capability() < (8, 0):
        return f"{text}; no TF32 here"
    errors = _arithmetic(environment, tf32=True)
    if not min(errors.values()) > 5e-5:
        raise AssertionError(f"relative errors {errors}: that is fp32")
    return f"{text}; in TF32 " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


@check("hang verdict, launch queue full", "the rank that hangs", seconds=150)
def hang(environment: Environment) -> str:
    short = ("train.hang_timeout=20", "cluster.grace_s=5", "train.eval_every=0")
    job = ("strategy=single", "precision=fp32", "batch.micro_size=4", "task.trouble=stuck", *short)
    output = " ".join(environment.train(*job, status=1).split())
    verdict = re.search(r"rank 0 (hangs on \S+ in step \d+)", output)
    if verdict is None:
        raise AssertionError("the output does not name the rank that hangs")
    if environment.events().count("hang") != 1:
        raise AssertionError("events.jsonl has no entry of the hang")
    return verdict[1]


@check("failure to verdict, 2 ranks", "10 s", seconds=120, alone=True)
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


@check("failing rank ends", "5 s", alone=True)
def nccl_failure(environment: Environment) -> str:
    """Check that a rank that fails with a kernel in flight and an NCCL communicator alive is soon gone."""
    mark = environment.folder / "raised"
    job = ("strategy=fsdp", "precision=fp32", "batch.micro_size=3", "task.trouble=raises", f"task.marks={mark.parent}")
    environment.train(*job, status=1)
    took_s = time.time() - mark.stat().st_mtime
    if environment.on_gpu and took_s > 5:
        raise AssertionError(f"{took_s:.1f} s from the failure to the end of `launch train`")
    return f"{took_s:.1f} s from the failure to the end of `launch train`"


@check("launch verify", "Verdict: exact", seconds=150)
def verify(environment: Environment) -> str:
    where = (f"cluster.device={environment.device}", "cluster.workers_per_node=1")
    job = ("task._target_=jobs.gpu.tasks.Words", "strategy=fsdp", "precision=bf16", "batch.global_size=24")
    output = " ".join(environment.launch("verify", *job, *where, "batch.micro_size=4").split())
    return output[output.index("Verdict: ") :][:160]


@check("launch doctor", "no failure", seconds=150)
def doctor(environment: Environment) -> str:
    output = environment.launch(
        "doctor", f"cluster.device={environment.device}", "cluster.workers_per_node=1", "--json"
    )
    entries = json.JSONDecoder().raw_decode(output, output.index("[\n"))[0]  # warnings may be around it
    failures = [entry for entry in entries if entry["state"] == "failure"]
    if failures:
        raise AssertionError(f"{failures[0]}")
    gpu = next((entry for entry in entries if entry["name"] == "gpu"), {"found": "no line about a GPU"})
    return str(gpu["found"])[:120]


@check("predicted memory", "0.8 to 1.25 of what is allocated", seconds=150, alone=True)
def memory(environment: Environment) -> str:
    """Compare the plan's memory peak with what torch allocates and reserves, and the constants of gpus.py with what the
    process has of the device beside that."""
    from launcher.plan.gpus import CONTEXT_BYTES, NCCL_BYTES

    large = (
        "task.width=1024", "task.depth=8", "task.length=128", "batch.global_size=256", "batch.micro_size=64",
        "task.samples=2560", "precision=bf16",
    )  # fmt: skip
    small = ("task.width=64", "batch.global_size=24", "batch.micro_size=4", "precision=fp32")
    before, report = _used_bytes() if environment.on_gpu else 0, environment.folder / "report"
    reported = ("task._target_=jobs.gpu.tasks.Reported", f"task.report={report}")
    environment.train("strategy=fsdp", *(large if environment.on_gpu else small), *reported)
    strategy = json.loads((environment.run / "plan.json").read_text())["strategy"]
    peaks = {forecast["sync"]: forecast["peak_bytes"] for forecast in strategy["forecasts"]}
    predicted, record = peaks.get(strategy["sync"]), environment.records()[-1]
    if not predicted:
        raise AssertionError(f"nothing was predicted for {strategy['sync']}: {strategy['sync_reason']}")
    allocated = record["memory/peak_bytes"]
    text = f"predicted {predicted / 2**20:.0f} MiB, allocated {allocated / 2**20:.0f} MiB: {predicted / allocated:.2f}"
    if not environment.on_gpu:
        return text
    reserved = record["memory/reserved_bytes"]
    device = max(int(line.split()[0]) for line in report.read_text().splitlines()) - before
    text += f"; reserved {reserved / 2**20:.0f} MiB, of the device {device / 2**20:.0f} MiB"
    beside, stated = device - reserved, CONTEXT_BYTES + NCCL_BYTES
    text += f", {beside / 2**20:.0f} beside it where the plan takes {stated / 2**20:.0f}"
    if not 0.8 < predicted / allocated < 1.25 or not allocated <= reserved or not 0 < beside <= 1.25 * stated:
        raise AssertionError(text)
    return text


def _used_bytes() -> int:
    """Return the bytes in use on the first GPU, without a CUDA context of this process."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 2**20


@check("MFU", "0.97 of a plain loop before or after it", seconds=150, alone=True)
def mfu(environment: Environment) -> str:
    """Compare samples/s of `launch train` with a plain loop: the bundled GPT in bf16, large enough to fill a GPU."""
    import torch

    from launcher.tasks.bytes_gpt import BytesGPT

    on_gpu = environment.on_gpu
    shape: dict[str, Any] = {"width": 1024, "heads": 8, "depth": 12, "seq_len": 512} if on_gpu else {}
    micro, accumulation, precision = (32, 4, "bf16") if on_gpu else (4, 2, "fp32")
    batch = (f"batch.global_size={micro * accumulation}", f"batch.micro_size={micro}", f"precision={precision}")
    job = ("train.steps=30", "strategy=single", "task._target_=launcher.tasks.bytes_gpt.BytesGPT", "train.eval_every=0")
    task = BytesGPT(**shape)
    data = task.train_data()
    batches = [torch.stack([data[n * micro + k] for k in range(micro)]) for n in range(accumulation)]
    items = micro * accumulation * task.seq_len
    plain = plain_loop(environment, task, batches, items, "single", precision)

    def plain_rate() -> float:
        return micro * accumulation / seconds_of(environment, 15 if on_gpu else 1, plain)[0]

    before = plain_rate()
    environment.train(*job, *batch, *(f"task.{name}={size}" for name, size in shape.items()))
    last = environment.records()[10:]
    rate = median(record["throughput/samples_per_s"] for record in last)
    share = min((rate / each for each in (before, plain_rate())), key=lambda share: abs(share - 1))
    text = f"{rate:.0f} samples/s, {share:.3f} of a plain loop"
    if on_gpu and share < 0.97:
        raise AssertionError(text)
    shares = [record["throughput/mfu"] for record in last if "throughput/mfu" in record]
    return f"{median(shares):.1%} at {text}" if shares else f"{text}; no peak is known for this device"


@check("seconds of communication, 2 ranks", "0 < comm/time_s <= time/step_s", seconds=150, alone=True)
def calibration(environment: Environment) -> str:
    precision = f"precision={'bf16' if environment.on_gpu else 'fp32'}"
    environment.train(
        "strategy=ddp",
        precision,
        "batch.micro_size=3",
        "train.steps=40",
        "task.width=256",
        "run.calibrate_s=60",
        workers=2,
    )
    names = ("speedup", "speedup_low", "speedup_high", "exposed_s", "overlap", "step_s_every")
    records = environment.records()
    figures = {name: record[f"comm/{name}"] for record in records for name in names if f"comm/{name}" in record}
    if not figures:
        raise AssertionError("nothing was measured")
    if not all(math.isfinite(value) for value in figures.values()):
        raise AssertionError(str(figures))
    times, steps = ([record[name] for record in records] for name in ("comm/time_s", "time/step_s"))
    if not all(0 < comm_s <= step_s for comm_s, step_s in zip(times, steps, strict=True)):
        raise AssertionError(f"seconds of collectives {times[-5:]} in steps of {steps[-5:]}")
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
