"""Micro-batches that fit into memory: what running out of it looks like, and the size that was found.

A size is halved where all ranks can agree on that between two micro-batches (engine.py). Where a rank runs out of
memory while others wait for it in a collective, it writes the smaller size down and leaves, and the agent begins the
workers again from the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from launcher.config.schema import OnOom, Sync
from launcher.errors import OutOfMemory
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED
from launcher.rundir.files import read_json, write_json
from launcher.train.parallel.batchnorm import Norms, PlainNorms
from launcher.train.world import World

# messages of libraries that raise no exception class of their own: CUDA's of memory that torch's allocator does not
# manage (kernels, page-locked memory), NCCL's, cuBLAS's and cuDNN's
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "'out of memory'",
)


class WindowAbandoned(Exception):
    """Another rank has run out of memory: the window is run again, with smaller micro-batches."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def can_abandon(plan: RunPlan, norms: Norms) -> bool:
    """Return whether the ranks can give up a window together: its small all-reduce must be its first collective."""
    batch, strategy = plan.batch, plan.strategy
    silent = batch.world_size == 1 or strategy.sync is not Sync.every
    return batch.on_oom is OnOom.shrink and strategy.kind not in SHARDED and silent and isinstance(norms, PlainNorms)


def fitted(plan: RunPlan, world: World) -> RunPlan:
    """``plan`` with the micro-batch that an earlier start has found to fit; all ranks call it. What was found for other
    sizes, or on other ranks, before the run was resumed with these, is not taken."""
    found: dict[str, Any] | None = world.of_rank_0(read_json(plan.paths.fitted) if world.rank == 0 else None)
    if found is None or found["of"] != _job(plan):
        return plan
    if world.rank == 0:
        print(f"Micro-batches of {found['micro_size']}: larger ones were found not to fit into memory.", flush=True)
    return dataclasses.replace(plan, batch=plan.batch.in_micro_batches_of(found["micro_size"]))


def note(asked: RunPlan, batch: Batch) -> None:
    """Keep the size of ``batch`` for the next start. ``asked``: the plan as it was submitted."""
    write_json(asked.paths.fitted, {"micro_size": batch.micro_size, "of": _job(asked)})


def _job(plan: RunPlan) -> dict[str, Any]:
    """What decides how much memory a micro-batch needs, and how much there is."""
    batch, strategy = plan.batch, plan.strategy
    return {
        "micro_size": batch.micro_size,
        "world_size": batch.world_size,
        "strategy": strategy.kind.value,
        "shard_size": strategy.shard_size,
        "recompute": strategy.recompute.value,
        "cpu_offload": strategy.cpu_offload,
        "precision": plan.precision.kind.value,
        "task": plan.task.params,
    }


def out_of_memory(error: BaseException, batch: Batch, rank: int, step: int) -> OutOfMemory:
    """What the run says where it cannot go on in place."""
    what = (
        f"Rank {rank} ran out of memory at step {step}, with micro-batches of {batch.micro_size}: {_first_line(error)}"
    )
    if (smaller := batch.shrunk()) is None:
        remedy = (
            "The micro-batch is one sample already. Use strategy.recompute=blocks, strategy=fsdp on more ranks, or "
            "precision=bf16."
        )
    elif batch.on_oom is OnOom.shrink:
        remedy = f"The run begins again from its newest checkpoint, with micro-batches of {smaller.micro_size}."
    else:
        remedy = (
            f"Use batch.micro_size={smaller.micro_size}, or batch.on_oom=shrink to have that found while it runs. The "
            "global batch stays the same."
        )
    return OutOfMemory(f"{what}\n  {remedy}")


def out_of_memory_beside(error: BaseException, rank: int, step: int, when: str) -> OutOfMemory:
    """The same for what is no window's forward or backward pass."""
    return OutOfMemory(
        f"Rank {rank} ran out of memory at step {step}, {when}: {_first_line(error)}\n"
        "  Use a smaller batch.micro_size, strategy=fsdp on more ranks, or strategy.recompute=blocks."
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
