"""Checks of the GPU acceptance that compare predicted memory with that of tensors on a GPU."""

from __future__ import annotations

import json

from jobs.gpu.registry import Environment, check


@check("predicted memory", seconds=150, alone=True)
def memory(environment: Environment) -> str:
    """Compare the plan's memory peak for the chosen policy with the allocator's."""
    shape = (
        "task.width=1024",
        "task.depth=8",
        "task.length=128",
        "batch.global_size=256",
        "batch.micro_size=64",
        "task.samples=2560",
    )
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
