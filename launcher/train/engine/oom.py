"""Out of memory: detection, and the micro-batch size that fits.

The size is halved in place if all ranks can agree on it between two micro-batches (engine.py). If other ranks wait in a
collective for the rank that ran out of memory, that rank stores the smaller size and exits, and the agent restarts the
workers from the newest checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.config.schema import OnOom, Sync
from launcher.errors import OutOfMemory
from launcher.plan.batch import Batch
from launcher.plan.run_plan import RunPlan, part
from launcher.plan.sync_policy import SHARDED
from launcher.rundir.files import read_json, write_json
from launcher.train.parallel.batchnorm import Norms
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
# of libraries that find no memory for their workspace: other causes have these words too, unless the GPU is full
_WORDS_IF_FULL = ("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate", "unable to find an engine to execute")
_FULL = 0.05  # share of a GPU's memory that is free
_MARGIN = 1.05  # of memory that is allocated in several parts


class WindowAbandoned(Exception):
    """Raised on the ranks whose window runs again with smaller micro-batches, because another rank is out of memory."""

    def __init__(self) -> None:
        super().__init__(
            "Another rank ran out of memory, and batch.on_oom=shrink runs this window again. The loop must pass this "
            "exception to engine.shrinks(error)."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` was raised because host or GPU memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(words in text for words in _WORDS) or (any(words in text for words in _WORDS_IF_FULL) and _gpu_is_full())


def _gpu_is_full() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after a failed device-side assertion every call of CUDA fails: memory is not the cause
        return False
    return free < _FULL * total


def fits_in_memory(nbytes: int, device: torch.device) -> bool:
    """Return whether ``nbytes`` more fit into the memory of ``device``, with a margin. True on the CPU, where a
    process that takes too much is killed."""
    if device.type != "cuda":
        return True
    (free, total), allocated = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated  # it is freed when needed
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - allocated
    return min(free + cached, allowed) >= _MARGIN * nbytes


def can_abandon(plan: RunPlan, norms: Norms) -> bool:
    """Return whether the ranks can give up a window together: its small all-reduce must be its first collective."""
    batch, strategy = plan.batch, plan.strategy
    silent = batch.world_size == 1 or strategy.sync is not Sync.every
    return batch.on_oom is OnOom.shrink and strategy.kind not in SHARDED and silent and norms.plain


def apply_stored_micro_size(plan: RunPlan, world: World) -> RunPlan:
    """Return ``plan`` with the micro-batch size that an earlier attempt has stored. All ranks call it.

    A size is ignored if it was stored for other values of the keys that affect memory.
    """
    stored: dict[str, Any] | None = world.of_rank_0(read_json(plan.paths.fitted) if world.rank == 0 else None)
    if stored is None or stored["of"] != part(plan, "memory"):
        return plan
    if world.rank == 0:
        print(f"Micro-batches of {stored['micro_size']}: larger ones did not fit into memory before.", flush=True)
    return plan.with_micro_batches(plan.batch.in_micro_batches_of(stored["micro_size"]))


def store_micro_size(submitted: RunPlan, batch: Batch) -> None:
    """Store the micro-batch size of ``batch`` for later attempts. ``submitted``: the plan as it was submitted."""
    write_json(submitted.paths.fitted, {"micro_size": batch.micro_size, "of": part(submitted, "memory")})


def out_of_memory(error: BaseException, batch: Batch, rank: int, step: int) -> OutOfMemory:
    """Return the error of a rank that ran out of memory in a window and cannot continue in place."""
    key, unit = ("micro_size", "") if batch.micro_tokens is None else ("micro_tokens", " tokens")
    size = f"{getattr(batch, key)}{unit}"
    what = f"Rank {rank} ran out of memory at step {step}, with micro-batches of {size}: {_first_line(error)}"
    if (smaller := batch.shrunk()) is None:
        remedy = (
            "The micro-batch is one sample already. Use strategy.recompute=blocks, strategy=fsdp on more ranks, or "
            "precision=bf16."
        )
    elif batch.on_oom is OnOom.shrink:
        remedy = f"The run restarts from its newest checkpoint, with micro-batches of {getattr(smaller, key)}{unit}."
    else:
        remedy = (
            f"Use batch.{key}={getattr(smaller, key)}, or batch.on_oom=shrink, which halves it during the run. The "
            "global batch stays the same."
        )
    return OutOfMemory(f"{what}\n  {remedy}")


def out_of_memory_beside(error: BaseException, rank: int, step: int, when: str, size_key: str) -> OutOfMemory:
    """Return the error of a rank that ran out of memory outside the passes of a window.

    Args:
        when: what it was doing, such as "while ...".
        size_key: key of the size of its micro-batches.
    """
    return OutOfMemory(
        f"Rank {rank} ran out of memory at step {step}, {when}: {_first_line(error)}\n"
        f"  Use a smaller {size_key}, strategy=fsdp on more ranks, or strategy.recompute=blocks."
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
