"""Checks of the GPU acceptance that compare predicted memory with that of torch's allocator."""

from __future__ import annotations

import json
import re
from functools import partial

from jobs.gpu.registry import Environment, check


@check("predicted memory", seconds=150, alone=True)
def memory(environment: Environment) -> str:
    """Compare the plan's memory peak for the chosen policy with the allocator's."""
    shape = ("task.width=1024", "task.depth=8", "task.length=128", "batch.global_size=256", "batch.micro_size=64")
    small = ("task.width=64", "batch.global_size=24", "batch.micro_size=4")
    precision = "bf16" if environment.on_gpu else "fp32"
    environment.train("strategy=fsdp", f"precision={precision}", *(shape if environment.on_gpu else small))
    strategy = json.loads((environment.run / "plan.json").read_text())["strategy"]
    peaks = {forecast["sync"]: forecast["peak_bytes"] for forecast in strategy["forecasts"]}
    predicted, allocated = peaks.get(strategy["sync"]), environment.records()[-1]["memory/peak_bytes"]
    if not predicted:
        raise AssertionError(f"nothing was predicted for {strategy['sync']}: {strategy['sync_reason']}")
    text = f"predicted {predicted / 2**20:.0f} MiB, allocated {allocated / 2**20:.0f} MiB: {predicted / allocated:.2f}"
    if environment.on_gpu and not 0.8 < predicted / allocated < 1.25:
        raise AssertionError(text)
    return text


def _reserved(environment: Environment, strategy: str, workers: int) -> str:
    """Compare what the plan predicts that torch's allocator reserves with what it does: with streams, whose blocks no
    other stream gets, and small units, so that blocks of several sizes are cached."""
    shape = ("task.width=1024", "task.depth=8", "task.length=128", "batch.global_size=256", "batch.micro_size=32")
    job = (*strategy.split(), "strategy.sync=every", "callbacks=[{_target_: jobs.gpu.tasks.ReservedMemory}]")
    environment.train(*job, "precision=bf16", *(shape if environment.on_gpu else ()), workers=workers)
    plan = json.loads((environment.run / "plan.json").read_text())["strategy"]
    forecast = next((each for each in plan["forecasts"] if each["sync"] == plan["sync"]), {})
    found = re.search(r"allocated (\d+) bytes, reserved (\d+) bytes", environment.log())
    if not environment.on_gpu:
        return "nothing is reserved on a CPU"
    if found is None or not forecast.get("reserved_bytes"):
        raise AssertionError("nothing was predicted, or rank 0 has printed nothing")
    allocated, reserved = int(found[1]), int(found[2])
    ratio = forecast["reserved_bytes"] / reserved
    text = (
        f"predicted {forecast['reserved_bytes'] / 2**20:.0f} MiB, reserved {reserved / 2**20:.0f} MiB: {ratio:.2f}; "
        f"allocated {allocated / 2**20:.0f} MiB, predicted {forecast['peak_bytes'] / 2**20:.0f} MiB"
    )
    if not 0.8 < ratio < 1.25:
        raise AssertionError(text)
    return text


for _strategy, _workers in (
    ("strategy=single", 1), ("strategy=ddp", 2), ("strategy=fsdp", 2), ("strategy=hsdp strategy.shard_size=2", 4),
):  # fmt: skip
    _name = f"predicted reserved memory: {_strategy.split()[0].removeprefix('strategy=')}"
    check(_name, seconds=180, alone=True)(partial(_reserved, strategy=_strategy, workers=_workers))
