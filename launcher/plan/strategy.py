"""Strategy solver: how the model is split over the ranks, and which sync policy runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.config.schema import (
    Compress,
    Config,
    Device,
    OptimizerKind,
    PrecisionKind,
    StrategyConfig,
    StrategyKind,
    Sync,
)
from launcher.errors import ConfigError
from launcher.plan import host
from launcher.plan.batch import Batch
from launcher.plan.float_format import float_format
from launcher.plan.gpus import find_gpu
from launcher.plan.launch_plan import ClusterPlan
from launcher.plan.optimizer_plan import TARGET
from launcher.plan.run_plan import Forecast, PrecisionPlan, RunPlan, StrategyPlan, TaskPlan, solved_part
from launcher.plan.sync_policy import POLICIES, SHARDED, Layout, transfers_per_window
from launcher.quantities import bytes_text

# Fraction of a rank's memory that tensors may take. The rounding and the fragments of torch's caching allocator and
# the buffers of the communication library need the rest.
USABLE_MEMORY = 0.92


def excess_bytes(forecast: Forecast, memory_bytes: int) -> int:
    """Return the bytes by which a forecast, or at least its share of parameters, gradients and optimizer state, exceeds
    what a rank may use; 0 if it fits or is not known.

    Args:
        memory_bytes: of the device, on a GPU without what CUDA and NCCL take.
    """
    return max(0, _known_bytes(forecast) - round(USABLE_MEMORY * memory_bytes))


def _known_bytes(forecast: Forecast) -> int:
    return forecast.peak_bytes or forecast.least_bytes or 0


# tensors of a parameter's size in the state of optimizers whose state is known
_STATE = {OptimizerKind.adamw.value: ("AdamW", 2), "torch.optim.Muon": ("Muon", 1)}


def _known_state(plan: RunPlan) -> tuple[list[str], float]:
    """Return the optimizers whose state is known, and the tensors of it for each parameter, on average."""
    optimizer, sizes = plan.optimizer, plan.task.group_parameters
    if plan.task.own_optimizer:
        return [], 0.0
    classes = [optimizer.name, *(group.get(TARGET, optimizer.name) for group in optimizer.groups)]
    if sizes is None:  # at least, if all parameters were in the group with the smallest state
        names, tensors = zip(*(_STATE.get(each, ("", 0)) for each in classes), strict=True)
        return (sorted({*names}), min(tensors)) if all(names) else ([], 0.0)
    known = [(*_STATE[each], size) for each, size in zip(classes, sizes, strict=True) if size and each in _STATE]
    total = sum(tensors * size for _, tensors, size in known)
    return sorted({name for name, _, _ in known}), total / max(1, sum(sizes))


def least_bytes(plan: RunPlan, sync: Sync = Sync.every) -> int | None:
    """Return what a rank needs for its share of parameters, gradients and optimizer state, and for what the policy
    keeps whole; None if the parameters are unknown, or in host memory."""
    task, strategy = plan.task, plan.strategy
    held = task.trained_bytes(plan.precision.parameters)
    if held is None or strategy.cpu_offload:
        return None
    trained = round(held * (2 + _known_state(plan)[1]))
    shared = (trained + 2 * task.frozen_parameters) // strategy.shard_size  # frozen ones may be in bf16
    whole = {Sync.boundary: 1, Sync.gather_once: 2}.get(sync, 0) if strategy.kind in SHARDED else 0
    return shared + whole * ITEM_BYTES[plan.precision.kind] * (task.parameters or 0)


def least_note(plan: RunPlan, memory_bytes: int | None) -> str:
    """Return a sentence on ``least_bytes``, which are known for a task that cannot be traced, too; or nothing."""
    least, (names, _) = least_bytes(plan), _known_state(plan)
    if least is None:
        return ""
    parts = f"parameters, gradients and the state of {' and '.join(names)}" if names else "parameters and gradients"
    excess = "" if memory_bytes is None or least <= memory_bytes else f"; it has {bytes_text(memory_bytes)}"
    return f"A rank needs at least {bytes_text(least)} for {parts}{excess}."


def excess_notes(plan: RunPlan) -> list[str]:
    """Return the warning that a plan does not fit into a GPU's memory."""
    forecast, memory = plan.strategy.forecast, plan.strategy.memory_bytes
    if forecast is None or memory is None or plan.cluster.device is not Device.cuda:
        return []
    if not (excess := excess_bytes(forecast, memory)):
        return []
    name = "the GPU here" if plan.cluster.gpu is None else f"cluster.gpu={plan.cluster.gpu}"
    return [
        f"A rank's tensors {'need at least' if forecast.peak_bytes is None else 'are predicted to need'} "
        f"{bytes_text(_known_bytes(forecast))}; they may take {USABLE_MEMORY:.0%} "
        f"of the {bytes_text(memory)} that {name} has for them: it does not fit, by {bytes_text(excess)}. Try a "
        "smaller batch.micro_size, strategy.recompute=blocks, or strategy=fsdp over more ranks."
    ]


CONFIGURED = "as configured"  # reason for a sync policy that the user chose
ITEM_BYTES: dict[str, int] = {kind: 4 if kind in ("auto", "fp32") else 2 for kind in PrecisionKind}


def job_lines(plan: RunPlan) -> dict[str, str]:
    """Return the description of the job for the reports of `launch verify` and `launch drill`, by subject."""
    strategy = plan.strategy
    compress = "" if strategy.compress is Compress.none else f", gradients sent as {strategy.compress.value}"
    return {
        "task": plan.task.target,
        "batch": plan.batch.text,
        "strategy": f"{strategy.kind.value}, sync {strategy.sync.value}{compress}",
        "precision": plan.precision.kind.value,
    }


def solve_strategy(
    config: StrategyConfig, batch: Batch, cluster: ClusterPlan, precision: PrecisionPlan, task: TaskPlan
) -> StrategyPlan:
    """Return the strategy with the policy of fewest wire bytes; ``with_memory`` also weighs predicted memory.

    Raises:
        ConfigError: a policy, a size or an option that this strategy does not have.
    """
    if config.cpu_offload and cluster.device is Device.cpu:
        raise ConfigError("strategy.cpu_offload", "true", "has no effect without GPUs.", "Leave it out.")
    allowed = POLICIES[config.kind]
    if config.sync is not Sync.auto and config.sync not in allowed:
        raise ConfigError(
            "strategy.sync", config.sync, f"strategy={config.kind.value} does not have this policy.",
            f"It has {', '.join(policy.value for policy in allowed)} and auto.",
        )  # fmt: skip
    shard_size = _shard_size(config, batch, cluster)
    special = next((name for name in ("static_graph", "find_unused_parameters") if getattr(config, name)), None)
    if special and config.sync is Sync.boundary and batch.accumulates:
        raise ConfigError(
            f"strategy.{special}", "true", "DDP loses gradients when this meets no_sync (sync=boundary).",
            f"Use strategy.sync=every, or strategy.{special}=false.",
        )  # fmt: skip
    if config.compress.keeps_residue and precision.kind is PrecisionKind.fp16:
        raise ConfigError(
            "strategy.compress", config.compress, "cannot be combined with precision=fp16: it adds "
            "what it did not send to the next gradient, so one overflow of fp16 would spoil all later steps.",
            "Use precision=bf16 or fp32, or strategy.compress=bf16.",
        )  # fmt: skip
    if config.compress is Compress.fp16:
        raise ConfigError(
            "strategy.compress", "fp16", "would turn gradients below 3e-8 into zero: fp16 has too few exponent bits.",
            "Use strategy.compress=bf16, which has the range of fp32 in the same two bytes.",
        )  # fmt: skip
    layout = _layout(config, batch, shard_size, precision, task)
    forecasts = tuple(_forecast(config.kind, sync, batch, layout) for sync in allowed)
    if config.sync is not Sync.auto:
        sync, reason = config.sync, CONFIGURED
    elif special:
        sync, reason = Sync.every, f"strategy.{special} is not safe with skipped synchronisation"
    else:
        # of equals the later one, which skips more as accumulation grows
        fewest = min(reversed(forecasts), key=lambda forecast: forecast.wire_bytes)
        sync, reason = fewest.sync, "fewest wire bytes"
    plan = solved_part(
        StrategyPlan,
        config,
        sync=sync,
        sync_reason=reason,
        shard_size=shard_size,
        # gather_once holds the whole model in any case; for other sharded policies memory is not yet known
        rehearses=config.kind not in SHARDED or sync is Sync.gather_once,
    )
    # what such a compression sends depends on every parameter's shape: measured by the meter, not predicted
    predictable = task.parameters is not None and not config.compress.keeps_residue
    return dataclasses.replace(plan, forecasts=forecasts) if predictable else plan


def with_memory(plan: StrategyPlan, forecasts: Sequence[Forecast], memory_bytes: int) -> StrategyPlan:
    """Return ``plan`` with the policy of the fewest wire bytes whose predicted peak fits ``memory_bytes``.

    If none fits, the one with the lowest peak is chosen.
    """
    fitting = [forecast for forecast in forecasts if not excess_bytes(forecast, memory_bytes)]
    if fitting:
        chosen = min(reversed(fitting), key=lambda forecast: (forecast.wire_bytes, _known_bytes(forecast)))
        reason = "fewest wire bytes" + ("" if len(fitting) == len(forecasts) else " of the policies that fit")
    else:
        chosen = min(reversed(forecasts), key=_known_bytes)
        reason = "least memory: no policy is predicted to fit"
    rehearses = len(fitting) == len(forecasts) and (chosen.peak_bytes is not None or chosen.sync is Sync.gather_once)
    return dataclasses.replace(
        plan, sync=chosen.sync, sync_reason=reason, memory_bytes=memory_bytes, rehearses=rehearses,
        forecasts=tuple(forecasts),
    )  # fmt: skip


def solve_precision(config: Config, cluster: ClusterPlan, bf16: bool | None) -> PrecisionPlan:
    """Return the number formats.

    Args:
        bf16: whether this machine computes bf16 natively; None: unknown, precision=auto stays unresolved. A GPU that
            the plan is for is looked up.

    Raises:
        ConfigError: an option that has no effect on this device.
    """
    if (added := float_format(config)) is not None:
        added.check(cluster)
    kind, reason, device = config.precision.kind, "", "this machine"
    if cluster.gpu is not None:
        bf16, device = find_gpu(cluster.gpu).bf16 is not None, cluster.gpu.upper()
    if kind is PrecisionKind.auto and bf16 is not None:
        kind = PrecisionKind.bf16 if bf16 else PrecisionKind.fp32
        reason = host.emulation_reason(kind, device)
    if config.precision.tf32 and cluster.device is not Device.cuda:
        raise ConfigError("precision.tf32", "true", "has no effect without GPUs.", "Leave it out.")
    return solved_part(PrecisionPlan, config.precision, kind=kind, reason=reason)


def _shard_size(config: StrategyConfig, batch: Batch, cluster: ClusterPlan) -> int:
    world = batch.world_size
    if config.kind is StrategyKind.fsdp:
        return world
    if config.kind is not StrategyKind.hsdp:
        return 1
    size = config.shard_size if config.shard_size is not None else cluster.workers_per_node
    divisors = [n for n in range(2, world) if world % n == 0]
    if size in divisors:
        return size
    if not divisors:
        raise ConfigError(
            "strategy", "hsdp", f"{world} ranks cannot be split into several shard groups of two or more.",
            "Use strategy=fsdp, or strategy=ddp.",
        )  # fmt: skip
    shown = size if config.shard_size is not None else f"{size} (the workers of one host)"
    why = "one group is strategy=fsdp" if size == world else "it must divide their number, be above 1 and below it"
    raise ConfigError(
        "strategy.shard_size", shown, f"does not split the {world} ranks into shard groups: {why}.",
        f"Use strategy.shard_size={' or '.join(map(str, divisors))}.",
    )  # fmt: skip


def _layout(config: StrategyConfig, batch: Batch, shard_size: int, precision: PrecisionPlan, task: TaskPlan) -> Layout:
    """Return the bytes per pass, computed without the padding of uneven shards, and as if all parameters were matrices
    of whole blocks: the trace of the model is exact.

    An unknown model is assumed to have 1,000,000 parameters: any size ranks the policies alike.
    """
    parameters = 1_000_000 if task.parameters is None else task.parameters
    own = task.trained_bytes(precision.parameters) or 4 * parameters
    if config.kind not in SHARDED:
        sent = own // 2 if config.compress is Compress.bf16 else own
        return Layout.replicated(sent, batch.world_size)
    # gathers move all parameters, reductions only the trained ones
    total = parameters + task.frozen_parameters
    trained_in_units = parameters // 2 if task.unit_parameters is None else task.unit_parameters
    in_units = trained_in_units + task.frozen_unit_parameters
    matmul = total if task.matmul_parameters is None else task.matmul_parameters
    in_units_matmul = in_units if task.unit_matmul_parameters is None else task.unit_matmul_parameters
    # trained parameters have one format, or they could not be sharded; frozen ones are assumed to have it too
    width = own // parameters
    narrower = 4 - ITEM_BYTES[precision.kind] if width == 4 else 0  # only fp32 is gathered in another format
    reduced = ITEM_BYTES[precision.reduce_dtype] * parameters
    unit_bytes = width * in_units - narrower * in_units_matmul
    root_bytes = width * (total - in_units) - narrower * (matmul - in_units_matmul)
    return Layout(
        shard_size=shard_size, replicas=batch.world_size // shard_size, unit_bytes=unit_bytes, root_bytes=root_bytes,
        gradient_bytes=reduced,
    )  # fmt: skip


def _forecast(kind: StrategyKind, sync: Sync, batch: Batch, layout: Layout) -> Forecast:
    payload = layout.payload(transfers_per_window(kind, sync, batch.predicted_accumulation))
    return Forecast(sync=sync, payload_bytes=sum(payload.values()), wire_bytes=layout.wire(payload), peak_bytes=None)
