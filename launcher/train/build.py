"""Model and optimizer, from what the user gives: wrapped, sharded, on this rank's device, and each other's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from launcher.errors import EngineMisuse
from launcher.plan import RunPlan
from launcher.policy import SHARDED
from launcher.train.deferred import NotDeferrable, Recipe
from launcher.train.deferred import build as build_deferred
from launcher.train.parallel import Parallel, ShardUnits, wrap

ModelFrom = nn.Module | Callable[[], nn.Module]
OptimizerFrom = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


def build(
    model: ModelFrom, optimizer: OptimizerFrom, plan: RunPlan, device: torch.device, shard_units: ShardUnits | None
) -> tuple[Parallel, Optimizer]:
    """The wrapped model, and the optimizer over the parameters that it has then."""
    recipe: Recipe | None = None
    if not isinstance(model, nn.Module):
        model, recipe = _made(model, deferred=plan.strategy.kind in SHARDED)
    model.zero_grad()  # what an earlier backward pass left there would be added to the first window
    if not isinstance(optimizer, Optimizer):
        parallel = wrap(model, plan, device, shard_units, recipe)
        optimizer = optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
        _require_all_parameters(model, optimizer)
        return parallel, optimizer
    _require_all_parameters(model, optimizer)
    before = dict(model.named_parameters())
    parallel = wrap(model, plan, device, shard_units, recipe)
    _hand_over(optimizer, before, model)
    return parallel, optimizer


def _made(make: Callable[[], nn.Module], *, deferred: bool) -> tuple[nn.Module, Recipe | None]:
    """The model; to be sharded, it is made without values, and they are filled in shard by shard."""
    if deferred:
        try:
            return build_deferred(make)
        except NotDeferrable as reason:
            print(f"The model is built whole on each rank before it is sharded: {reason}", flush=True)
    return make(), None


def _require_all_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """The norm, the clip and the loss scale are those of all gradients, so none may be left to somebody else."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        raise EngineMisuse(
            f"The optimizer has not all of the model's trained parameters: {', '.join(left_out[:8])} and so on.\n"
            "  Give it all of them, or freeze the others (requires_grad_(False)) before the engine is made."
        )


def _hand_over(optimizer: Optimizer, before: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Sharding gives a model new parameters: let ``optimizer`` hold them in place of those of ``before``, by name.

    Raises:
        EngineMisuse: it has state of the old ones already.
    """
    after = dict(model.named_parameters())
    if all(after.get(name) is parameter for name, parameter in before.items()):
        return
    if optimizer.state:
        raise EngineMisuse(
            "The optimizer has taken steps already, and its state cannot be sharded.\n  Give the engine a fresh one."
        )
    new = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
