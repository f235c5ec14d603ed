"""Loop, output and end of a test's workers: programs that torchrun or a warm pool starts, one process for each rank."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher import Engine
from launcher.errors import LauncherError

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


class Calls:
    """Counter that the engine does not restore after passes without training, as it does numbers and iterators: it is
    in the environment."""

    def __init__(self) -> None:
        self._name = f"CALLS_{id(self)}"
        os.environ[self._name] = "0"

    def count(self) -> int:
        """Return 1, 2, 3 ..."""
        os.environ[self._name] = str(int(os.environ[self._name]) + 1)
        return int(os.environ[self._name])


def run_shrinking(
    engine: Engine,
    windows: Iterable[Any],
    loss: Callable[[Any], Any],
    fails_at: int | None = None,
    *,
    after_backward: bool = False,
) -> list[int]:
    """Train, and return the number of micro-batches of each window.

    Args:
        loss: the forward pass of a micro-batch; it may raise OutOfMemoryError itself.
        fails_at: the pass in which memory does not suffice; its window runs again.
    """
    passes, micro_batches = itertools.count(), list[int]()
    for window in windows:
        try:
            for batch in window:
                found, fails = loss(batch), next(passes) == fails_at
                if after_backward or not fails:
                    engine.backward(found)
                if fails:
                    raise torch.OutOfMemoryError("injected")
        except torch.OutOfMemoryError as error:
            if not engine.shrinks(error):
                raise
            continue
        micro_batches.append(engine.step().micro_batches)
    return micro_batches


def flat(tensors: Iterable[Any]) -> Tensor:
    """Return the values of whole tensors, one after the other, in fp64 on the CPU."""
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors)
    return torch.cat([t.detach().double().flatten().cpu() for t in whole])


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference, relative to that of ``wanted``."""
    return ((found - wanted).norm() / wanted.norm()).item()


def message_of(run: Callable[[], object]) -> str:
    """Return the name and the message of the launcher's error that ``run`` raises; empty if it raises none."""
    try:
        run()
    except LauncherError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def print_on_rank_0(results: Any) -> None:
    """Print ``results`` as one line of JSON, on rank 0 only."""
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)


def leave_group() -> None:
    """End the process group, when all ranks are here: one that ends before would fail the others."""
    dist.barrier()
    dist.destroy_process_group()
