"""Check of an optimizer's first step on sharded parameters (DTensor)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.plan.sync_policy import SHARDED
from launcher.train.engine.oom import is_out_of_memory
from launcher.train.optimizers import members_of


@contextmanager
def sharded_step(optimizer: Optimizer, strategy: StrategyKind) -> Iterator[None]:
    """Context manager of an optimizer's first step, which must be that of whole parameters.

    Raises:
        TaskError: parameters are sharded, and the step fails on them, or reads a number that is of this rank's shard
            only, such as a norm with ``item()``, and does not sum it over the ranks.
    """
    if strategy not in SHARDED:
        yield
        return
    others = [type(each).__name__ for each in members_of(optimizer) if not type(each).__module__.startswith("torch.")]
    reads = _LocalNumbers()
    try:
        if others:
            with reads:
                yield
        else:
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        names = ", ".join(type(each).__name__ for each in members_of(optimizer))
        what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise TaskError(_text(names, strategy, f"fails on sharded parameters: {what}")) from error
    if reads.found and not reads.sums:
        why = "reads numbers of sharded tensors (item(), float() or a condition), and gets those of this rank's shard"
        raise TaskError(_text(", ".join(others), strategy, why))


def _text(names: str, strategy: StrategyKind, why: str) -> str:
    return (
        f"{names} cannot be used with strategy={strategy.value}: its step {why}.\n"
        "  Use strategy=ddp; or another optimizer, such as torch.optim.AdamW."
    )


class _LocalNumbers(TorchDispatchMode):
    """Mode that notes whether numbers of sharded tensors are read, and whether collectives are called beside those of
    DTensor."""

    found = sums = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensor = args[0] if args else None
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(tensor, DTensor):
            self.found |= any(not placement.is_replicate() for placement in tensor.placements)
        self.sums |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))
