"""Checks of the GPU acceptance that run `launch ...` like a user, and read the run's record."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.gpu.registry import GLOBAL, ROOT, STEPS, Place, Skip, check, need_cuda

# limit on the relative distance between a logged loss and that of a plain loop over big batches in the same precision
LOSS_WITHIN = {"fp32": 2e-4, "bf16": 2e-2, "fp16": 5e-3}


def plain_losses(place: Place) -> list[float]:
    """Return the loss of each window of the run from a loop without the launcher: one big batch, autocast, AdamW."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    from launcher.plan.run_plan import RunPlan
    from launcher.task import load_task, seed_everything
    from launcher.train.data.randomness import Permutation

    plan = RunPlan.load(place.run / "plan.json")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision.kind.value)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    seed_everything(plan.train.seed)
    task: Any = load_task(plan.task.target, plan.task.params, [str(ROOT)])
    model = task.model().to(place.device)
    data, optimizer = task.train_data(), plan.optimizer
    betas = (optimizer.betas[0], optimizer.betas[1])
    adamw = torch.optim.AdamW(
        model.parameters(), optimizer.lr, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    order, losses = Permutation(len(data), plan.train.seed, 0), list[float]()
    for step in range(STEPS):
        batch = task.collate([data[i] for i in order.take(step * GLOBAL, GLOBAL)])
        batch = (batch["words"] if isinstance(batch, dict) else batch).to(place.device)
        with torch.autocast(place.device, dtype, enabled=dtype is not None):
            loss = task.loss(model, batch)
        mean = loss.total / loss.items
        mean.backward()
        assert plan.train.clip_norm is not None
        clip_grad_norm_(model.parameters(), plan.train.clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(mean.item())
    return losses


def compare_with_plain(place: Place, precision: str) -> str:
    seen, wanted = [record["train/loss"] for record in place.records()], plain_losses(place)
    if len(seen) != STEPS:
        raise AssertionError(f"{len(seen)} steps were recorded, not {STEPS}")
    worst = max(abs(a / b - 1) for a, b in zip(seen, wanted, strict=True))
    if not worst <= LOSS_WITHIN[precision]:
        raise AssertionError(f"losses {seen} differ from a plain loop's {wanted} by {worst:.2g}")
    return f"loss within {worst:.1e} of a plain loop"


def _curves() -> Iterator[tuple[str, str, int, str, tuple[str, ...]]]:
    for precision in ("fp32", "bf16", "fp16"):
        yield f"single {precision}", "single", 1, precision, ("batch.micro_size=4",)
    for precision in ("fp32", "bf16"):
        yield f"fsdp, world 1, {precision}", "fsdp", 1, precision, ("batch.micro_size=4",)
        yield f"ddp, 2 ranks, {precision}", "ddp", 2, precision, ("batch.micro_size=3",)
        yield f"fsdp, 2 ranks, {precision}", "fsdp", 2, precision, ("batch.micro_size=3",)
        yield f"hsdp, 4 ranks, {precision}", "hsdp", 4, precision, ("batch.micro_size=3", "strategy.shard_size=2")
    yield "fsdp, 2 ranks, fp16", "fsdp", 2, "fp16", ("batch.micro_size=3",)
    once = ("batch.micro_size=3", "strategy.sync=gather_once")
    yield "fsdp, 2 ranks, gather_once, bf16", "fsdp", 2, "bf16", once
    offload = ("batch.micro_size=4", "strategy.cpu_offload=true")
    yield "cpu_offload, fp32", "fsdp", 1, "fp32", offload
    yield "cpu_offload, fp16, 2 ranks", "fsdp", 2, "fp16", ("batch.micro_size=3", "strategy.cpu_offload=true")
    yield "recompute, bf16", "single", 1, "bf16", ("batch.micro_size=4", "strategy.recompute=blocks")
    yield "recompute, fsdp, bf16", "fsdp", 1, "bf16", ("batch.micro_size=4", "strategy.recompute=blocks")
    yield "compress=bf16, 2 ranks", "ddp", 2, "bf16", ("batch.micro_size=3", "strategy.compress=bf16")
    window = ("batch.micro_size=3", "batch.norm=window", "task._target_=jobs.gpu.tasks.Normalised")
    yield "BatchNorm over the window, 2 ranks", "ddp", 2, "fp32", window
    nested = ("batch.micro_size=4", "task._target_=jobs.gpu.tasks.Nested")
    yield "batches of every type", "single", 1, "fp32", nested
    yield "deterministic", "single", 1, "fp32", ("batch.micro_size=4", "train.deterministic=true")


def _register_curves() -> None:
    for name, strategy, workers, precision, overrides in _curves():

        def run(
            place: Place, strategy: str = strategy, workers: int = workers, precision: str = precision,
            overrides: tuple[str, ...] = overrides,
        ) -> str:  # fmt: skip
            if "strategy.cpu_offload=true" in overrides:
                need_cuda(place)
            place.train(f"strategy={strategy}", f"precision={precision}", *overrides, workers=workers)
            return compare_with_plain(place, precision)

        check(name)(run)


_register_curves()


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


@check("resume, bit by bit", seconds=150)
def resume(place: Place) -> str:
    """Compare a run that dies after an asynchronous save and is resumed with one that does not die."""
    import torch

    job = (
        "strategy=single", "precision=bf16", "batch.micro_size=4", "task.dropout=0.1", "checkpoint.every=2",
        "train.deterministic=true", f"task.marks={place.folder}",
    )  # fmt: skip
    place.train(*job, "run.name=whole")
    place.train(*job, "task.trouble=dies", f"task.after={4 * GLOBAL // 4}", status=1)
    before = sorted(path.name for path in (place.run / "checkpoints").glob("step_*"))
    if not before or f"step_{STEPS:06}" in before:
        raise AssertionError(f"checkpoints when it died: {before}")
    place.launch("resume", str(place.run))
    whole = place.run.with_name("whole")
    mine, wanted = (tensors(run / "checkpoints" / f"step_{STEPS:06}") for run in (place.run, whole))
    different = [name for name in wanted if not torch.equal(mine[name], wanted[name])]
    if mine.keys() != wanted.keys() or different:
        raise AssertionError(f"other values after resume: {different[:5]}")
    return f"{len(wanted)} tensors equal, resumed from {before[-1]}"


@check("async saves", seconds=120)
def saves(place: Place) -> str:
    shape = ("task.width=512", "task.depth=4", "batch.micro_size=4", "precision=bf16", "strategy=fsdp")
    place.train(*shape, "checkpoint.every=1", "checkpoint.keep=null")
    found = sorted(path.name for path in (place.run / "checkpoints").glob("step_*"))
    if found != [f"step_{step:06}" for step in range(1, STEPS + 1)]:
        raise AssertionError(f"checkpoints: {found}")
    held = [record["time/checkpoint_s"] for record in place.records() if "time/checkpoint_s" in record]
    return f"{len(found)} saves, {1e3 * sorted(held)[len(held) // 2]:.0f} ms of a step each (median)"


@check("out of memory: shrink", seconds=150)
def shrink(place: Place) -> str:
    """Check that the micro-batch shrinks: 24 samples of 100 MB do not fit into 1.5 GB, 12 do."""
    need_cuda(place)
    job = ("strategy=single", "precision=fp32", "task.megabytes=100", "task.room=1500")
    place.train(*job, "batch.micro_size=24", "batch.on_oom=shrink")
    sizes = [(record["batch/micro_size"], record["batch/accumulation"]) for record in place.records()]
    if any(micro > 12 or micro * accumulation != GLOBAL for micro, accumulation in sizes):
        raise AssertionError(f"micro-batches and accumulation: {sizes}")
    if "out of memory. From here on" not in place.log():
        raise AssertionError("the log does not tell of the smaller micro-batches")
    return f"{GLOBAL} -> {sizes[-1][0]:.0f} samples in place; {compare_with_plain_of(place)}"


def compare_with_plain_of(place: Place) -> str:
    """Compare as in ``compare_with_plain`` for a task that needs more memory than a big batch may use."""
    plan = json.loads((place.run / "plan.json").read_text())
    plan["task"]["params"] |= {"megabytes": 0, "room": 0}
    (place.run / "plan.json").write_text(json.dumps(plan))
    return compare_with_plain(place, "fp32")


@check("micro_size=auto", seconds=150)
def auto_micro(place: Place) -> str:
    need_cuda(place)
    job = ("strategy=single", "precision=fp32", "task.megabytes=100", "task.room=1500", "batch.micro_size=auto")
    place.train(*job)
    found = {record["batch/micro_size"] for record in place.records()}
    if len(found) != 1 or not 6 <= next(iter(found)) <= 12:
        raise AssertionError(f"micro-batches {found}: 12 samples fit, 24 do not")
    return f"found {next(iter(found)):.0f}; {compare_with_plain_of(place)}"


@check("out of memory in a collective: restart", seconds=180)
def restart(place: Place) -> str:
    need_cuda(place)
    job = ("strategy=fsdp", "precision=fp32", "task.megabytes=150", "task.room=1500", "checkpoint.every=1")
    place.train(*job, "batch.micro_size=12", "batch.on_oom=shrink", workers=2)
    sizes = [record["batch/micro_size"] for record in place.records()]
    return f"micro-batches {sizes[0]:.0f} to {sizes[-1]:.0f}; {compare_with_plain_of(place)}"


def _compiled(place: Place, *overrides: str) -> str:
    if place.device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            raise Skip("triton is not installed") from None
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        raise Skip("no C compiler")
    place.train(*overrides, "precision=bf16", "batch.micro_size=4", "train.compile=true", "train.eval_every=3")
    return compare_with_plain(place, "bf16")


@check("compile, accumulation", seconds=180)
def compile_single(place: Place) -> str:
    return _compiled(place, "strategy=single")


@check("compile, FSDP2", seconds=180)
def compile_fsdp(place: Place) -> str:
    return _compiled(place, "strategy=fsdp")


@check("compile, recompute, FSDP2", seconds=180)
def compile_recompute(place: Place) -> str:
    return _compiled(place, "strategy=fsdp", "strategy.recompute=blocks")


def _arithmetic(place: Place, tf32: bool) -> dict[str, float]:
    report = place.folder / f"tf32-{tf32}"
    words = ("precision.tf32=true",) if tf32 else ()
    job = ("strategy=single", "precision=fp32", "batch.micro_size=4", "task._target_=jobs.gpu.tasks.Arithmetic")
    place.train(*job, f"task.report={report}", f"run.name={report.name}", *words)
    return {name: float(error) for name, error in (line.split() for line in report.read_text().splitlines())}


@check("fp32 is fp32")
def fp32(place: Place) -> str:
    errors = _arithmetic(place, tf32=False)
    if not max(errors.values()) < 1e-5:
        raise AssertionError(f"relative errors {errors}: that is TF32")
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


@check("TF32 where asked for")
def tf32(place: Place) -> str:
    import torch

    need_cuda(place)
    if torch.cuda.get_device_capability() < (8, 0):
        raise Skip("this GPU has no TF32")
    errors = _arithmetic(place, tf32=True)
    if not min(errors.values()) > 5e-5:
        raise AssertionError(f"relative errors {errors}: that is fp32")
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


@check("hang verdict of a stuck kernel", seconds=150)
def hang(place: Place) -> str:
    short = ("train.hang_timeout=20", "cluster.grace_s=5", "train.eval_every=0")
    job = ("strategy=single", "precision=fp32", "batch.micro_size=4", "task.trouble=stuck", *short)
    said = " ".join(place.train(*job, status=1).split())
    found = re.search(r"rank 0 (hangs on \S+ in step \d+)", said)
    if found is None:
        raise AssertionError("the output does not name the rank that hangs")
    events = [json.loads(line) for line in (place.run / "events.jsonl").read_text().splitlines()]
    if [event["event"] for event in events].count("hang") != 1:
        raise AssertionError("events.jsonl has no entry of the hang")
    return found[1]


@check("launch verify", seconds=150)
def verify(place: Place) -> str:
    where = (f"cluster.device={place.device}", "cluster.workers_per_node=1")
    job = ("task._target_=jobs.gpu.tasks.Words", "strategy=fsdp", "precision=bf16", "batch.global_size=24")
    said = " ".join(place.launch("verify", *job, *where, "batch.micro_size=4").split())
    return said[said.index("Verdict: ") :][:160]


@check("launch verify finds a mistake", seconds=150)
def verify_mistake(place: Place) -> str:
    where = (f"cluster.device={place.device}", "cluster.workers_per_node=1")
    job = ("task._target_=jobs.gpu.tasks.MeanOfMeans", "strategy=single", "batch.global_size=24")
    place.launch("verify", *job, *where, "batch.micro_size=4", status=1)
    return "the mean of means is refused"


@check("launch doctor", seconds=150)
def doctor(place: Place) -> str:
    said = place.launch("doctor", f"cluster.device={place.device}", "cluster.workers_per_node=1", "--json")
    found = json.loads(said[said.index("[") :])
    failures = [entry for entry in found if entry["state"] == "failure"]
    if failures:
        raise AssertionError(f"{failures[0]}")
    gpu = next((entry for entry in found if entry["name"] == "gpu"), {"found": "no line about a GPU"})
    return str(gpu["found"])[:120]


@check("W&B offline")
def wandb(place: Place) -> str:
    place.train("strategy=single", "precision=fp32", "batch.micro_size=4", "wandb.mode=offline")
    files = [path for path in place.run.rglob("*.wandb") if path.stat().st_size]
    if not files:
        raise AssertionError("no W&B file was written")
    return f"{files[0].stat().st_size} bytes"


@check("MFU", seconds=150, alone=True)
def mfu(place: Place) -> str:
    """Measure the model FLOPs utilisation of the bundled GPT in bf16, large enough to fill a GPU."""
    large = ("task.width=1024", "task.heads=8", "task.depth=12", "task.seq_len=512", "batch.global_size=128")
    small = ("task.width=64", "task.heads=2", "task.depth=2", "task.seq_len=32", "batch.global_size=32")
    shape = large if place.device == "cuda" else small
    steps = ("train.steps=20", "strategy=single", "task._target_=launcher.tasks.bytes_gpt.BytesGPT")
    place.train(*shape, *steps, f"batch.micro_size={32 if place.device == 'cuda' else 16}", "task.eval_samples=32",
                "precision=bf16" if place.device == "cuda" else "precision=fp32")  # fmt: skip
    last = place.records()[10:]
    rates = sorted(record["throughput/samples_per_s"] for record in last)
    rate = rates[len(rates) // 2]
    shares = sorted(record["throughput/mfu"] for record in last if "throughput/mfu" in record)
    if not shares:
        return f"{rate:.0f} samples/s; no peak is known for this device"
    share = shares[len(shares) // 2]
    if not 0.01 < share < 1:
        raise AssertionError(f"MFU {share}")
    return f"{share:.1%} at {rate:.0f} samples/s"


@check("calibration, 2 ranks", seconds=150, alone=True)
def calibration(place: Place) -> str:
    place.train("strategy=ddp", "precision=bf16" if place.device == "cuda" else "precision=fp32", "batch.micro_size=3",
                "train.steps=40", "task.width=256", workers=2)  # fmt: skip
    names = (
        "comm/speedup",
        "comm/speedup_low",
        "comm/speedup_high",
        "comm/exposed_s",
        "comm/overlap",
        "comm/step_s_every",
    )
    found = {name: record[name] for record in place.records() for name in names if name in record}
    if not found:
        raise AssertionError("nothing was measured")
    if not all(math.isfinite(value) for value in found.values()):
        raise AssertionError(str(found))
    times = [record["comm/time_s"] for record in place.records()]
    steps = [record["time/step_s"] for record in place.records()]
    if not any(times) or any(time > step * 1.05 for time, step in zip(times, steps, strict=True)):
        raise AssertionError(f"seconds of collectives {times[-5:]} in steps of {steps[-5:]}")
    return ", ".join(f"{name.removeprefix('comm/')} {value:.3g}" for name, value in found.items())


@check("predicted memory", seconds=150, alone=True)
def memory(place: Place) -> str:
    """Compare the plan's memory peak for the chosen policy with the allocator's."""
    shape = ("task.width=1024", "task.depth=8", "task.length=128", "batch.global_size=256", "batch.micro_size=64")
    small = ("task.width=64", "batch.global_size=24", "batch.micro_size=4")
    precision = "bf16" if place.device == "cuda" else "fp32"
    place.train("strategy=fsdp", f"precision={precision}", *(shape if place.device == "cuda" else small))
    strategy = json.loads((place.run / "plan.json").read_text())["strategy"]
    peaks = {forecast["sync"]: forecast["peak_bytes"] for forecast in strategy["forecasts"]}
    predicted, seen = peaks.get(strategy["sync"]), place.records()[-1]["memory/peak_bytes"]
    if not predicted:
        raise AssertionError(f"nothing was predicted for {strategy['sync']}: {strategy['sync_reason']}")
    text = f"predicted {predicted / 2**20:.0f} MiB, allocated {seen / 2**20:.0f} MiB: {predicted / seen:.2f}"
    if place.device == "cuda" and not 0.8 < predicted / seen < 1.25:
        raise AssertionError(text)
    return text
