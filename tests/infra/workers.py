"""Output and end of a test's workers: programs that torchrun or a warm pool starts, one process for each rank."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

# kind, sync policy and options of the sharded and replicated jobs of four ranks
OF_FOUR_RANKS: list[tuple[str, ...]] = [
    ("ddp", "every"),
    ("ddp", "boundary", "strategy.recompute=blocks"),
    ("fsdp", "every"),
    ("fsdp", "boundary"),
    ("fsdp", "boundary", "strategy.recompute=blocks"),
    ("fsdp", "gather_once"),
    ("hsdp", "every"),
    ("hsdp", "boundary"),
    ("hsdp", "gather_once", "strategy.recompute=blocks"),
    ("hsdp", "replicas_at_boundary"),
]


def print_on_rank_0(results: Any) -> None:
    """Print ``results`` as one line of JSON, on rank 0 only."""
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)


def leave_group() -> None:
    """End the process group, when all ranks are here: one that ends before would fail the others."""
    dist.barrier()
    dist.destroy_process_group()
