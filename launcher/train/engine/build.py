"""Model and optimizer, from what the user gives: wrapped, sharded, on this rank's device, and each other's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from launcher.config.schema import Parameters, PrecisionKind, Recompute, StrategyKind
from launcher.errors import EngineMisuse, TaskError
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED
from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.parallel.base import Parallel, ShardUnits
from launcher.train.parallel.deferred_init import Recipe
from launcher.train.parallel.deferred_init import build as build_deferred
from launcher.train.parallel.init_recorder import NotDeferrable
from launcher.train.parallel.replicas import require_same_structure, share_model, share_values
from launcher.train.parallel.shard_units import find_units, require_parameters
from launcher.train.precision import parameters_to_fp32
from launcher.train.world import World

ALONE = World(rank=0, size=1, local_rank=0)
ModelFrom = nn.Module | Callable[[], nn.Module]
OptimizerFrom = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


def build(
    model: ModelFrom,
    optimizer: OptimizerFrom,
    plan: RunPlan,
    device: torch.device,
    shard_units: ShardUnits | None,
    world: World | None = None,
) -> tuple[Parallel, Optimizer]:
    """Wrap the model, and make the optimizer over the parameters that it has then.

    A model in eval mode, as ``from_pretrained`` returns it, is put into training mode; a module in eval mode inside a
    model in training mode stays so.

    Args:
        world: ranks that make sure that they start with one model; None: the model is only looked at.
    """
    world = world or ALONE
    sharded = plan.strategy.kind in SHARDED
    recipe: Recipe | None = None
    if not isinstance(model, nn.Module):
        model, recipe = _made(model, world, deferred=sharded)
    require_same_structure(model, world)
    if sharded and recipe is None:  # DDP broadcasts by itself
        share_model(model, world)
    if not model.training:
        model.train()
    model.zero_grad()  # what an earlier backward pass left there would be added to the first window
    _set_formats(model, optimizer if isinstance(optimizer, Optimizer) else None, plan, world)
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


def _set_formats(model: nn.Module, optimizer: Optimizer | None, plan: RunPlan, world: World) -> None:
    """Let trained parameters be fp32, as ``precision.parameters`` says.

    Raises:
        TaskError: fp16 parameters are kept, whose gradients cannot be unscaled.
    """
    if plan.precision.parameters is Parameters.fp32:
        frozen = plan.precision.kind is PrecisionKind.fp32
        changed = parameters_to_fp32(model, frozen=frozen, optimizer=optimizer)
        if changed and world.rank == 0 and not plan.task.target:  # the plan of a task says so
            print(f"{changed:,} trained parameters become fp32; precision.parameters=keep leaves them.", flush=True)
    elif plan.precision.kind is PrecisionKind.fp16 and any(
        p.dtype == torch.float16 and p.requires_grad for p in model.parameters()
    ):
        raise TaskError(
            "model(): trained parameters in fp16 cannot be kept with precision=fp16: torch does not unscale fp16 "
            "gradients.\n  Use precision.parameters=fp32, or precision=bf16."
        )


def _made(make: Callable[[], nn.Module], world: World, *, deferred: bool) -> tuple[nn.Module, Recipe | None]:
    """Make the model; to be sharded, it is made without values, and they are filled in shard by shard."""
    if not deferred:
        return make(), None
    before = random_state(torch.device("cpu"))
    made: tuple[nn.Module, Recipe] | None = None
    reason = "its construction is not the same on all ranks"
    try:
        made = build_deferred(make)
    except NotDeferrable as refusal:
        reason = str(refusal)
    signatures = world.of_all(made and made[1].signature())
    if made is not None and all(signature == signatures[0] for signature in signatures):
        made[1].agree = lambda value: share_values([value], world)
        return made
    print(f"The model is built whole on each rank before it is sharded: {reason}", flush=True)
    restore_random_state(before, torch.device("cpu"))
    del made
    return make(), None


class TrainedParameters:
    """The parameters that require a gradient, as the strategy and the optimizer were set up for them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = self._now()

    def require_same(self) -> None:
        """Raise EngineMisuse where parameters were frozen or unfrozen since then."""
        now = self._now()
        if now == self._names:
            return
        changes = {"unfrozen": sorted(now - self._names), "frozen": sorted(self._names - now)}
        found = "; ".join(
            f"{how}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
            for how, names in changes.items()
            if names
        )
        raise EngineMisuse(
            f"The set of trained parameters has changed since the engine was made ({found}).\n"
            "  Gradients are synchronised, sharded and updated for the parameters that were trained then. Let those "
            "require a gradient that\n  are ever trained, and give them a learning rate of 0 until then; or save, and "
            "make a new model and a new engine for each phase."
        )

    def _now(self) -> set[str]:
        return {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}


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


def wrap(
    model: nn.Module,
    plan: RunPlan,
    device: torch.device,
    shard_units: ShardUnits | None = None,
    recipe: Recipe | None = None,
) -> Parallel:
    """``model`` as the plan's strategy has it.

    Args:
        shard_units: of the task; default: the model's repeated blocks.
        recipe: how to fill a model that was built without values; only for strategies that shard.

    Raises:
        TaskError: the model cannot be cut as ``shard_units`` says, or has nothing to train.
    """
    require_parameters(model)
    strategy = plan.strategy
    units: list[nn.Module] = []
    if strategy.kind in SHARDED or strategy.recompute is Recompute.blocks:
        units = find_units(model, None if shard_units is None else shard_units(model))
    if plan.train.compile and strategy.kind in SHARDED:
        compile_forward(units or [model])
    if strategy.recompute is Recompute.blocks:
        recompute(units)
    if strategy.kind in SHARDED:
        from launcher.train.parallel.fsdp import Fsdp

        return Fsdp(model, units, plan, device, recipe)
    model.to(device)
    if plan.train.compile:
        model.compile()
    if strategy.kind is StrategyKind.single or plan.batch.world_size == 1:
        return Parallel(model, plan, device)
    from launcher.train.parallel.ddp import Ddp

    return Ddp(model, plan, device)


def compile_forward(modules: Sequence[nn.Module]) -> None:
    """Compile the forward function of each of ``modules``, inside the hooks of ``fully_shard`` and inside recompute.

    ``Module.compile`` would put both into the compiled region. They are not traced there: under recompute the unit
    then runs without the compiler, and no message says so.
    """
    for module in modules:
        module.forward = torch.compile(module.forward)


def recompute(units: Sequence[nn.Module]) -> None:
    """Let each unit keep its inputs only, and run again in backward for what it needs."""
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
