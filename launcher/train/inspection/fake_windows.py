"""Windows of a task on fake tensors, which a trace runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from launcher.loss import as_losses, loss_of_batch
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from launcher.task import Task
from launcher.train.parallel.base import Parallel
from launcher.train.precision import Precision

WINDOWS = 2  # the optimizer's state exists from the second window on


def run_fake_windows(
    plan: RunPlan,
    task: Task,
    inputs: Any,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> dict[Collective, int]:
    """Run windows of at most two micro-batches, which suffice for the peak: further ones keep nothing more. Return the
    payload bytes of a full window of the plan."""
    precision = Precision(plan.precision, device)
    micro_batches = min(2, plan.batch.accumulation)

    def window() -> list[Mapping[Collective, int]]:
        payloads: list[Mapping[Collective, int]] = []
        for number in range(micro_batches):
            last = number == micro_batches - 1
            parallel.meter.open_window()
            with parallel.micro_batch(plan.strategy.sync, first=number == 0, last=last), precision.autocast():
                losses = as_losses(
                    loss_of_batch(task, parallel.module, inputs), plan.batch.micro_size, plan.task.target
                )
                total = sum((loss.total for loss in losses[1:]), losses[0].total)
                with parallel.backward(total):
                    precision.backward(total)
            if last:
                parallel.gradients()
                optimizer.step()
                parallel.zero_grad()
            payloads.append(parallel.meter.payload)
            gc.collect()  # frees what reference cycles of the task and of torch hold
        return payloads

    for _ in range(WINDOWS - 1):
        window()
    payloads = window()
    return _full_window(payloads[0], payloads[-1], plan.batch.accumulation)


def _full_window(
    first: Mapping[Collective, int], last: Mapping[Collective, int], micro_batches: int
) -> dict[Collective, int]:
    """Return the payload of a window of ``micro_batches``, from that of its first and its last micro-batch. Those in
    between gather like the last one, because no policy gathers more at the boundary, and reduce like the first."""
    between = micro_batches - 1
    reduces = (Collective.all_reduce, Collective.reduce_scatter)
    payload = {kind: first[kind] * between + last[kind] for kind in reduces}
    gathers = Collective.all_gather
    return payload | {gathers: first[gathers] + last[gathers] * between if between else last[gathers]}
