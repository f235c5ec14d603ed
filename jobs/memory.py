"""Memory cost of accumulation: one micro-batch's activations, and the gradients.

    launch run -- jobs/memory.py                    # two ranks: the peak of each shape

bytes_gpt in windows of one micro-batch, of 8 micro-batches, and of one that is 8 times as large. The peak on a CPU is
that of the tensors, counted by torch's memory tracker; on a GPU that of allocated memory.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.tasks.bytes_gpt import BytesGPT

MICRO, WINDOWS = 4, 3
SHAPES = {"1 micro-batch": (1, 1), "8 micro-batches": (8, 1), "1 that is 8 times as large": (1, 8)}


def measure(task: BytesGPT, strategy: str, accumulation: int, factor: int) -> tuple[int, int, int]:
    """Return this rank's peak in bytes, its gradients in bytes, and its number."""
    data = task.train_data()
    sizes = [f"batch.micro_size={MICRO * factor}", f"batch.accumulation={accumulation}", f"train.steps={WINDOWS}"]
    options = [f"strategy={strategy}", "strategy.sync=every", "precision=fp32", "run.calibrate_s=0"]
    plan = make_plan([*sizes, *options, "train.loader_workers=0"], samples=len(data))
    engine = Engine(task.model, lambda p: torch.optim.AdamW(p, 1e-3), plan, shard_units=task.shard_units)
    gpu, tracker = engine.device.type == "cuda", MemTracker()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        tracker.track_external(engine.parallel.module, engine.optimizer)
    with nullcontext() if gpu else tracker:
        for window in engine.windows(data):
            for batch in window:
                tracker.reset_mod_stats()
                tokens = batch.long()
                logits, targets = engine.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
                engine.backward(functional.cross_entropy(logits, targets, reduction="sum"), targets.numel())
            engine.step()
    if gpu:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = next(s["Total"] for place, s in tracker.get_tracker_snapshot("peak").items() if place.type == "cpu")
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in engine.parallel.module.parameters())
    return peak, parameters // plan.strategy.shard_size, engine.world.rank  # numel() counts the whole parameter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    options = parser.parse_args()
    task = BytesGPT(width=options.width, depth=options.depth, heads=3)
    for strategy in options.strategies:
        measured = {name: measure(task, strategy, *shape) for name, shape in SHAPES.items()}
        one, eight, large = (peak / 1e6 for peak, _, _ in measured.values())
        _, gradients, rank = measured["1 micro-batch"]
        if rank == 0:
            shown = "; ".join(f"{name} {peak / 1e6:.2f} MB" for name, (peak, _, _) in measured.items())
            print(f"{strategy}: peak of {shown}; gradients {gradients / 1e6:.2f} MB")
            print(
                f"{strategy}: 8 micro-batches hold {eight - one:.2f} MB more than 1; as one, {large - one:.2f} MB more"
            )


if __name__ == "__main__":
    main()
