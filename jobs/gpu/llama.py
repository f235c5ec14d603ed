"""Checks of the GPU acceptance with task=llama: attention within documents, and tokens per second of real sizes."""

from __future__ import annotations

import dataclasses
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

from jobs.gpu.registry import Environment, Skip, check, missing_compiler

# tokens/s of an 8 B model on one H200, sequences of 4096, bf16, full recompute, compile, fused AdamW (KempnerForge)
PUBLISHED_8B = 10_471
STEPS = 12
JOB = (
    # draws the values on the GPU: one core would take minutes
    "task=llama", "task._target_=jobs.gpu.tasks.DrawnOnGpu", "task.eval_samples=1", "train.eval_every=0",
    "checkpoint.enabled=false", "strategy=single", f"train.steps={STEPS}", "optimizer.lr=1e-4", "batch.on_oom=shrink",
)  # fmt: skip
# on a CPU, only to run the code of the check
TINY = (
    "task.width=64", "task.depth=2", "task.heads=4", "task.kv_heads=2", "task.ffn=96", "task.vocab=256",
    "task.seq_len=64",
)  # fmt: skip
# bf16 parameters, gradients and optimizer state: 8 bytes per parameter instead of 16
NARROW = ("task.dtype=bf16", "precision.parameters=keep")
SETTINGS: dict[str, tuple[str, ...]] = {
    "1b": ("batch.global_size=16", "batch.micro_size=4"),
    "8b": ("batch.global_size=8", "batch.micro_size=2", "strategy.recompute=blocks", *NARROW),
}


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")


def _require_memory(size: str, settings: tuple[str, ...]) -> None:
    """Raise Skip if parameters, gradients and optimizer state alone do not fit."""
    import torch

    from launcher.extensions.hf.llama import Llama
    from launcher.train.inspection.built_task import build_inspected

    count = sum(parameter.numel() for parameter in build_inspected(Llama(size=size), "Llama", 0).parameters())
    needed, memory = count * (8 if NARROW[0] in settings else 16), torch.cuda.get_device_properties(0).total_memory
    if needed > 0.95 * memory:
        raise Skip(
            f"{count / 1e9:.2f} billion parameters with gradients and optimizer state take {needed / 2**30:.0f} GiB, "
            f"and this GPU has {memory / 2**30:.0f} GiB"
        )


def _predicted_bytes(environment: Environment, micro_size: int) -> int | None:
    """Return the memory that the plan predicts for the micro-batch that the job ended with."""
    from launcher.plan.run_plan import RunPlan
    from launcher.plan.task_inspection import weigh_memory

    plan = RunPlan.load(environment.run / "plan.json")
    forecasts = plan.strategy.forecasts
    if micro_size != plan.batch.micro_size:
        accumulation = plan.batch.global_size // micro_size
        batch = dataclasses.replace(plan.batch, micro_size=micro_size, accumulation=accumulation)
        forecasts = weigh_memory(dataclasses.replace(plan, batch=batch), choose=False).strategy.forecasts
    return next((forecast.peak_bytes for forecast in forecasts if forecast.sync is plan.strategy.sync), None)


def _require_float8(environment: Environment) -> None:
    """Raise Skip if this GPU does not multiply in float8, or not fast."""
    import torch

    if find_spec("torchao") is None or missing_compiler(environment):
        raise Skip(missing_compiler(environment) or "torchao is not installed")
    if torch.cuda.get_device_capability() < (8, 9):
        raise Skip("this GPU has no float8 units")


def _throughput(environment: Environment, size: str, precision: str, *, compiled: bool, least: float) -> str:
    """Measure tokens/s and the model FLOPs utilisation, and compare the memory peak with the predicted one.

    Args:
        least: smallest utilisation, where the GPU's peak is known.
    """
    _require_transformers()
    settings = (*SETTINGS[size], f"precision={precision}")
    if precision == "float8" and environment.on_gpu:
        _require_float8(environment)
    elif precision == "float8":
        settings += ("float8.emulate=true",)
    if environment.on_gpu:
        _require_memory(size, settings)
        if compiled and (lacking := missing_compiler(environment)):
            raise Skip(lacking)
        shape = ("task.seq_len=4096", f"train.compile={str(compiled).lower()}")
    else:
        shape = (*TINY, "train.compile=false")
    environment.train(*JOB, f"task.size={size}", *settings, *shape)
    last = environment.records()[STEPS // 2 :]

    def of_step(name: str) -> float | None:
        values = [record[name] for record in last if name in record]
        return median(values) if values else None

    rate, share, micro = of_step("throughput/items_per_s"), of_step("throughput/mfu"), of_step("batch/micro_size")
    if not rate or not micro or (share is not None and not least <= share < 1):
        raise AssertionError(f"{rate} tokens/s, MFU {share}, micro-batches of {micro}")
    predicted = _predicted_bytes(environment, int(micro))
    allocated = max(record["memory/peak_bytes"] for record in environment.records())
    used = ", ".join(each.rpartition(".")[2] for each in (*shape, *settings) if "size=" not in each)
    text = f"{rate:,.0f} tokens/s"
    if size == "8b" and environment.on_gpu:
        text += f" ({rate / PUBLISHED_8B:.2f} of {PUBLISHED_8B:,} on one H200)"
    text += ", MFU unknown" if share is None else f", MFU {share:.1%}"
    text += f"; predicted {predicted / 2**30:.2f} GiB, " if predicted else "; nothing predicted, "
    return f"{text}allocated {allocated / 2**30:.2f} GiB; {used}, micro-batches of {micro:.0f}"


for _name, _size, _precision, _compiles_it, _least in (
    ("llama 1b", "1b", "bf16", False, 0.2),
    ("llama 1b, compile", "1b", "bf16", True, 0.4),
    ("llama 1b, float8", "1b", "float8", True, 0.2),
    ("llama 8b", "8b", "bf16", True, 0.4),
):
    check(_name, f"MFU of {_least:.0%}", seconds=300 if _size == "8b" else 180, alone=True)(
        partial(_throughput, size=_size, precision=_precision, compiled=_compiles_it, least=_least)
    )


@check("llama documents", "1e-3 in fp32, 5e-2 in bf16", seconds=180)
def documents(environment: Environment) -> str:
    """Compare rows of several documents with each document alone, loss and gradient, as a GPU computes them."""
    import torch

    from launcher.extensions.hf.llama import Llama

    _require_transformers()
    torch.manual_seed(0)
    task = Llama(width=256, depth=2, heads=4, kv_heads=2, ffn=512, vocab=512, seq_len=512)
    task.eos, task._pack = 3, True
    reference: Any = task.model().double()
    rows = torch.randint(4, 512, (2, 513))
    for row, ends in enumerate(([0, 99, 100, 300], [511])):
        rows[row, ends] = 3
    total = _loss_of_each_alone(reference, rows)
    total.backward()
    report = list[str]()
    for dtype, within in ((torch.float32, 1e-3), (torch.bfloat16, 5e-2)):
        for way in ("plain", "recompute", "compile", "compile and recompute"):
            if "compile" in way and (not environment.on_gpu or missing_compiler(environment)):
                continue
            model, loss = _trained_in(way, task, reference, rows, environment.device, dtype)
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            worst = max(((a.grad.cpu() - b.grad).norm() / b.grad.norm()).item() for a, b in pairs)
            worst = max(worst, abs(loss / total.item() - 1))
            if not worst < within:
                raise AssertionError(f"{way}, {dtype}: relative distance {worst:.2g} from each document alone")
            report.append(f"{way} {worst:.0e}")
    return ", ".join(report)


def _loss_of_each_alone(model: Any, rows: Any) -> Any:
    """Return the summed loss of the documents of ``rows``, each in a pass of its own."""
    import torch
    from torch.nn.functional import cross_entropy

    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        stops = [1 + int(place) for place in (row[:-1] == 3).nonzero()]
        for start, stop in zip([0, *stops], [*stops, 512], strict=True):
            if stop > start:
                predicted = torch.where(row[start:stop] == 3, -100, row[start + 1 : stop + 1])
                total = total + cross_entropy(model(row[None, start:stop]).logits[0], predicted, reduction="sum")
    return total


def _trained_in(way: str, task: Any, reference: Any, rows: Any, device: Any, dtype: Any) -> tuple[Any, float]:
    """Return a model with the parameters of ``reference`` and their gradients, and its loss.

    Args:
        way: names compile, recompute or both.
        dtype: of autocast, or fp32.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    from launcher.train.engine.build import compile_forward, recompute

    model: Any = task.model()
    model.load_state_dict(reference.state_dict())
    model.to(device)
    if "compile" in way:
        compile_forward(task.compile_units(model))
    if "recompute" in way:
        recompute(task.shard_units(model))
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), task.collate([*rows]))
    with torch.autocast(device, dtype, enabled=dtype is torch.bfloat16):
        loss = task.loss(model, batch)
    loss.total.backward()
    return model, loss.total.item()
