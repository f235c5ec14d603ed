"""Models that no strategy can train, or that cannot be sharded: refused before anything is made of them, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from launcher.errors import TaskError
from launcher.quantities import first_names

_DDP = "or use strategy=ddp"
UNDIVIDED = (
    "Leave the model whole: strategy=fsdp shards it. Tensor, pipeline, context and expert\n  parallelism need a "
    "trainer that has them, which `launch run` starts"
)


def require_trainable(model: nn.Module, *, sharded: bool, deferred: bool) -> None:
    """Check that the model can be trained, and sharded if it is to be.

    Args:
        deferred: tensors on the meta device get their values later.

    Raises:
        TaskError: it has nothing to train, or parts that cannot be trained.
    """
    kind = type(model).__name__
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # a model that has DTensors has imported their module, which a look at any other task is not to wait for
    divided: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    refuse(
        (name for name, tensor in tensors if isinstance(tensor, divided)),
        "shards already (DTensor), from parallelize_module, fully_shard or distribute_tensor",
        UNDIVIDED,
    )
    refuse(
        (name for name, tensor in tensors if is_lazy(tensor)),
        "no shape before the first forward pass (nn.Lazy...)",
        "Give their modules the sizes (nn.Linear instead of nn.LazyLinear), or run a forward pass before",
    )
    if not trained:
        raise TaskError(
            f"model: {kind} has no parameter that requires a gradient: there is nothing to train.\n"
            "  Give it parameters, or unfreeze some (requires_grad_(True))."
        )
    refuse(
        (name for name, tensor in tensors if tensor.layout is not torch.strided),
        "a sparse layout, and ranks and checkpoints exchange dense tensors",
        "Register indices and values as two dense buffers, and make the sparse tensor of them in the forward pass",
    )
    if not deferred:
        refuse(
            (name for name, tensor in tensors if tensor.is_meta),
            "no values: they are on the meta device",
            "Build it on the CPU: of a model that is sharded, and that a function makes, only rank 0's takes memory",
        )
    embeddings = {
        f"{name}.weight".lstrip("."): module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    refuse((name for name, weight in embeddings.items() if weight.requires_grad), *SPARSE_GRADIENTS)
    if sharded:
        scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        refuse([name or kind for name in scripted[:1]], "TorchScript's fixed parameters", f"Do not script it, {_DDP}")
        refuse(
            (name for name, p in trained if not p.numel()),
            "no numbers, and shards of a parameter must have some",
            f"Freeze it (requires_grad_(False)), {_DDP}",
        )
        refuse(
            (name for name, p in model.named_parameters() if not p.ndim),
            "no dimension that could be sharded",
            f"Give it the shape [1], {_DDP}",
        )


SPARSE_GRADIENTS = (
    "sparse gradients, and those of a window are dense",
    "Leave out sparse=True: the gradients have the same values",
)

SCALED_GRADIENTS = (
    "gradients that are divided by the frequencies within a micro-batch, not within the window",
    "Leave out scale_grad_by_freq=True; or use one rank and batch.accumulation=1",
)


def refuse(found: Iterable[str], why: str, remedy: str) -> None:
    """Raise TaskError if names were found. ``why``: what these parts of the model have."""
    if names := [*found]:
        has = "has" if len(names) == 1 else "have"
        raise TaskError(f"model: {first_names(names, 8)} {has} {why}.\n  {remedy}.")


def registered_again(names: Sequence[str]) -> TaskError:
    """Return the error that a forward pass has put other parameters in the place of these."""
    return TaskError(
        f"{first_names(names)}: the forward pass registers another parameter in its place (module.NAME = "
        "nn.Parameter(...)), which nothing trains.\n  Use the computed tensor under another name, as in "
        "functional.linear(x, normalize(self.weight)); or write the parameter itself in a callback's\n  on_step: with "
        "torch.no_grad(): parameter.copy_(...)."
    )
