"""Effect of accumulation with BatchNorm: the four choices of batch.norm on task=digits.

launch run cluster.workers_per_node=2 -- jobs/batchnorm.py

Prints the distance of the first gradient from that of one big batch in plain torch, held-out loss (mean and standard
deviation over seeds) and accuracy, and the time of a step. Gradients are in fp64: in fp32 a number near a ReLU's kink
may be rounded to its other side.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from launcher import Engine, make_plan
from launcher.tasks.digits import Digits

OVERRIDES = ["precision=fp32", "train.clip_norm=null", "schedule=constant", "train.loader_workers=0",
             "run.calibrate_s=0", "batch.global_size=64"]  # fmt: skip
TASK = Digits()


def loss_of(forward: Any, batch: Any) -> tuple[Tensor, int]:
    pixels, digits = batch
    return functional.cross_entropy(forward(pixels), digits, reduction="sum"), len(digits)


def in_double(data: TensorDataset) -> TensorDataset:
    return TensorDataset(data.tensors[0].double(), data.tensors[1])


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def one_big_batch(model: nn.Module, batches: list[list[Tensor]]) -> Tensor:
    own = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    everyone: list[Any] = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(everyone, own)
    total, items = loss_of(model, [torch.cat(parts) for parts in zip(*everyone, strict=True)])
    return flat(torch.autograd.grad(total / items, list(model.parameters())))


def train(overrides: list[str], seed: int, data: Any) -> tuple[float, float, float, float]:
    torch.manual_seed(seed)
    model = TASK.model().double()
    initial = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = Engine(model, optimizer, make_plan([*OVERRIDES, *overrides, f"train.seed={seed}"], samples=len(data)))
    applied: list[Tensor] = []
    hook = optimizer.register_step_pre_hook(lambda *_: applied.append(flat(p.grad for p in model.parameters())))
    first, seconds = [], []
    for window in engine.windows(data, forward=loss_of):
        start = time.perf_counter()
        for batch in window:
            if not engine.steps:
                first.append(batch)
            engine.backward(*loss_of(engine.model, batch))
        engine.step()
        hook.remove()
        seconds.append(time.perf_counter() - start)
    expected = one_big_batch(initial, first)
    engine.share_buffers()
    pixels, digits = in_double(TASK.eval_data()).tensors
    with torch.no_grad():
        scores = model.eval()(pixels)
    right = (scores.argmax(1) == digits).float().mean().item()
    distance = ((applied[0] - expected).norm() / expected.norm()).item()
    return distance, functional.cross_entropy(scores, digits).item(), right, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    arguments, data = parser.parse_args(), in_double(TASK.train_data())
    head = "| accumulation | batch.norm | gradient off by | held-out loss | accuracy | step |\n" + "|---" * 6 + "|\n"
    for accumulation in (1, 8, 32):
        for norm in ("leave", "sync", "freeze", "window"):
            overrides = [f"batch.accumulation={accumulation}", f"batch.norm={norm}", f"train.epochs={arguments.epochs}"]
            distance, loss, right, step_s = zip(
                *[train(overrides, seed, data) for seed in range(arguments.seeds)], strict=True
            )
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"{head}| {accumulation} | `{norm}` | {max(distance):.1e} | {statistics.mean(loss):.4f} ± "
                      f"{statistics.pstdev(loss):.4f} | {statistics.mean(right):.2%} | "
                      f"{statistics.median(step_s) * 1e3:.1f} ms |", flush=True)  # fmt: skip
            head = ""


if __name__ == "__main__":
    main()
