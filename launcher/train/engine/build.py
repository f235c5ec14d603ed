"""Construction of the parts of an engine from what the user passes to it: the wrapped model, its optimizer, and how
they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from launcher.config.schema import Parameters, PrecisionKind, Recompute, StrategyKind
from launcher.errors import EngineMisuse, TaskError
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED
from launcher.quantities import first_names
from launcher.train.checkpoint.initial import InitialValues
from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.engine.modes import start_training
from launcher.train.engine.preserved_state import ChangingParameters, PreservedState
from launcher.train.optimizers import as_one, set_mode
from launcher.train.parallel.base import Parallel, ShardUnits
from launcher.train.parallel.batchnorm import Norms, norms_of
from launcher.train.parallel.deferred_init import BuildProgress, InitialShards, build_for_shards
from launcher.train.parallel.mixed_precision import set_format
from launcher.train.parallel.model_check import require_trainable
from launcher.train.parallel.replicas import require_same_structure, share_model
from launcher.train.parallel.shard_units import find_units, require_parts
from launcher.train.precision import Precision, parameters_to_fp32
from launcher.train.world import ALONE, World

ModelFrom = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class FromModel:
    """Function that makes the optimizer, or several, from the wrapped model instead of its parameters."""

    make: Callable[[nn.Module], Optimizer | Sequence[Optimizer]]


Optimizers = Optimizer | Sequence[Optimizer]
OptimizerFrom = Optimizers | Callable[[Iterable[nn.Parameter]], Optimizers] | FromModel


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine that its other parts work on.

    Attributes:
        plan: as the engine was made. With ``batch.on_oom=shrink`` the engine's own plan changes.
        owner: object that the forward pass belongs to, such as the task.
        functions: the loop's own functions that the passes run.
    """

    world: World
    device: torch.device
    plan: RunPlan
    parallel: Parallel
    optimizer: Optimizer
    precision: Precision
    norms: Norms
    owner: object
    functions: list[object] = field(default_factory=list)

    def preserve(self) -> PreservedState:
        """Save the state that passes without an optimizer step can change."""
        return PreservedState(self.parallel.module, self.device, [self.owner, *self.functions], self.changing)

    @functools.cached_property
    def changing(self) -> ChangingParameters:
        """Parameters that such passes are known to change."""
        return ChangingParameters(self.world.local_size)


def build_parts(
    model: ModelFrom,
    optimizer: OptimizerFrom,
    plan: RunPlan,
    device: torch.device,
    shard_units: ShardUnits | None,
    world: World,
    owner: object,
    values: InitialValues | None,
) -> EngineParts:
    """Build the parts of an engine. All ranks call it. Raises like ``Engine``."""
    compile_units = getattr(owner, "compile_units", None)
    parallel, optimizer = build_parallel(model, optimizer, plan, device, shard_units, world, values, compile_units)
    offloads = torch.device("cpu") if plan.strategy.cpu_offload else None
    precision = Precision(plan.precision, device, gradients_on=offloads)
    norms = norms_of(plan, parallel, precision, device)
    return EngineParts(world, device, plan, parallel, optimizer, precision, norms, owner)


def build_parallel(
    model: ModelFrom,
    optimizer: OptimizerFrom,
    plan: RunPlan,
    device: torch.device,
    shard_units: ShardUnits | None,
    world: World | None = None,
    values: InitialValues | None = None,
    compile_units: ShardUnits | None = None,
) -> tuple[Parallel, Optimizer]:
    """Wrap the model, and make the optimizer of the parameters that it then has.

    The model is put into training mode, see ``start_training``.

    Args:
        world: ranks that check that they have the same model, and share its values. None: no communication, for an
            inspection of the model.
        values: replace those of the model before the optimizer is made.
        compile_units: the task's function of that name.
    """
    world = world or ALONE
    sharded, initial = plan.strategy.kind in SHARDED, None
    if isinstance(model, nn.Module):
        require_trainable(model, sharded=sharded, deferred=False)
        require_same_structure(model, world)
        if values is not None:
            values.check(model)
    else:
        model, initial = _make(model, world, values, sharded=sharded)
    if sharded and initial is None:  # DDP broadcasts by itself
        share_model(model, world)
    start_training(model)
    model.zero_grad()  # gradients of an earlier backward pass would be added to the first window's
    if isinstance(optimizer, Sequence):
        optimizer = as_one(optimizer)
    _set_formats(model, optimizer if isinstance(optimizer, Optimizer) else None, plan, world)
    set_format(model, plan)
    before = dict(model.named_parameters()) if isinstance(optimizer, Optimizer) else {}
    parallel = wrap(model, plan, device, shard_units, initial, compile_units)
    if values is not None:
        values.fill(model)
    if isinstance(optimizer, Optimizer):
        _replace_parameters(optimizer, before, model)
    elif isinstance(optimizer, FromModel):
        optimizer = as_one(optimizer.make(model))
    else:
        optimizer = as_one(optimizer(parameter for parameter in model.parameters() if parameter.requires_grad))
    _require_all_parameters(model, optimizer)
    set_mode(optimizer, training=True)
    return parallel, optimizer


def _set_formats(model: nn.Module, optimizer: Optimizer | None, plan: RunPlan, world: World) -> None:
    """Convert trained parameters to fp32, unless ``precision.parameters`` is keep.

    Raises:
        TaskError: fp16 parameters are kept under ``precision=fp16``; their gradients cannot be unscaled.
    """
    if plan.precision.parameters is Parameters.fp32:
        frozen = plan.precision.kind is PrecisionKind.fp32
        changed = parameters_to_fp32(model, frozen=frozen, optimizer=optimizer)
        if changed and world.rank == 0 and not plan.task.target:  # for a task, the plan has shown it
            print(
                f"{changed:,} trained parameters are converted to fp32. To train them in their own format: "
                "precision.parameters=keep.",
                flush=True,
            )
    elif plan.precision.kind is PrecisionKind.fp16 and any(
        p.dtype == torch.float16 and p.requires_grad for p in model.parameters()
    ):
        raise TaskError(
            "model: trained parameters in fp16 cannot be kept with precision=fp16: torch does not unscale fp16 "
            "gradients.\n  Use precision.parameters=fp32, or precision=bf16."
        )


def _make(
    construct: Callable[[], nn.Module], world: World, values: InitialValues | None, *, sharded: bool
) -> tuple[nn.Module, InitialShards | None]:
    """Make the model. If it will be sharded, only rank 0's has its initial values if possible, and not even that one if
    ``values`` replaces all of them."""
    before, shards = random_state(torch.device("cpu")), sharded and world.size > 1

    def make() -> nn.Module:
        with BuildProgress(world):
            return construct()

    model, initial = build_for_shards(make, world, values=values is None) if shards else (make(), None)
    require_trainable(model, sharded=sharded, deferred=initial is not None)
    require_same_structure(model, world)
    if values is not None:
        replaced = values.check(model)
        if initial is not None and not initial.complete(model, without=replaced):
            restore_random_state(before, torch.device("cpu"))
            model, initial = build_for_shards(make, world)
        if initial is not None:
            initial.left_out = replaced
    return model, initial


def _require_all_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise EngineMisuse unless the optimizer has each trained parameter once: norm, clip and loss scale need all
    gradients, and a checkpoint stores each by its name."""
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    held, own = set(listed), {id(p) for p in model.parameters()}
    if len(listed) > len(held) or not held <= own:
        which = "has a parameter twice" if len(listed) > len(held) else "has a parameter that is not the model's"
        raise EngineMisuse(f"The optimizer {which}.\n  Pass it each of the model's trained parameters once.")
    if left_out := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise EngineMisuse(
            f"The optimizer lacks {len(left_out)} of the model's trained parameters: {first_names(left_out, 8)}.\n"
            "  Pass it all of them, or freeze the others (requires_grad_(False)) before the engine is made."
        )


def _replace_parameters(optimizer: Optimizer, before: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Replace the parameters in ``optimizer`` by those that sharding has created, by name.

    Raises:
        EngineMisuse: the optimizer already has state of the old parameters.
    """
    after = dict(model.named_parameters())
    if all(after[name] is parameter for name, parameter in before.items()):
        return
    if any(optimizer.state.values()):
        raise EngineMisuse(
            "The optimizer has already taken steps, and its state cannot be sharded.\n  Pass the engine a new one."
        )
    optimizer.state.clear()  # train() of an optimizer may have added empty entries
    new = {id(parameter): after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]


def wrap(
    model: nn.Module,
    plan: RunPlan,
    device: torch.device,
    shard_units: ShardUnits | None,
    initial: InitialShards | None,
    compile_units: ShardUnits | None = None,
) -> Parallel:
    """Wrap ``model`` by the plan's strategy.

    Args:
        shard_units: the task's function of that name; default: the model's repeated blocks.
        initial: values of a model that was built without them; only for strategies that shard.
        compile_units: the task's function of that name.

    Raises:
        TaskError: ``shard_units`` or ``compile_units`` cannot be applied.
    """
    strategy = plan.strategy
    sharded = strategy.kind in SHARDED
    units: list[nn.Module] = []
    if sharded or strategy.recompute is Recompute.blocks:
        units = find_units(model, None if shard_units is None else shard_units(model))
    if plan.train.compile and compile_units is not None:
        compiled = compile_units(model)
        require_parts(model, compiled, "compile_units")
        compile_forward(compiled)
    elif plan.train.compile and sharded:
        compile_forward(units or [model])
    if strategy.recompute is Recompute.blocks:
        recompute(units)
    if sharded:
        from launcher.train.parallel.fsdp import Fsdp

        return Fsdp(model, units, plan, device, initial)
    model.to(device)
    if whole := plan.train.compile and compile_units is None:
        model.compile()
    if strategy.kind is StrategyKind.single or plan.batch.world_size == 1:
        return Parallel(model, plan, device)
    from launcher.train.parallel.ddp import Ddp

    return Ddp(model, plan, device, compiled=whole)


def compile_forward(modules: Sequence[nn.Module]) -> None:
    """Compile the forward function of each of ``modules``, inside the hooks of ``fully_shard`` and inside recompute.
    One compilation serves all modules of one kind. A deep copy of a module computes with its own parameters.

    ``Module.compile`` would put both into the compiled region. They are not traced there: under recompute the unit
    then runs without the compiler, and no message says so.
    """
    for module in modules:
        if "forward" in vars(module):  # a function of the user's
            module.forward = torch.compile(module.forward)
        else:  # a bound method would stay that of the original in a copy
            module.forward = functools.partial(torch.compile(type(module).forward), module)


def recompute(units: Sequence[nn.Module]) -> None:
    """Let each unit keep only its inputs for the backward pass, which runs the unit again."""
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
