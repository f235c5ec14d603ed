"""Memory limit of a rank: which forecasts fit, and the warning of a plan that leaves too little."""

from __future__ import annotations

from launcher.config.schema import OptimizerKind
from launcher.plan.gpus import FULL_SHARE, OVERHEAD_BYTES
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.quantities import bytes_text

# Fraction of a rank's memory that tensors may take where the allocator is not modelled; its rounding and the
# communication library's buffers need the rest.
USABLE_MEMORY = 0.92


def needed_bytes(forecast: Forecast) -> int | None:
    """Return what a rank needs: what the allocator reserves if that is predicted, else its tensors; None if unknown."""
    return forecast.peak_bytes if forecast.reserved_bytes is None else forecast.reserved_bytes


def excess_bytes(forecast: Forecast, memory_bytes: int) -> int:
    """Return the bytes by which a forecast exceeds what a rank may use; 0 if it fits or is not known.

    Args:
        memory_bytes: of the device, on a GPU without what CUDA and NCCL take.
    """
    limit = memory_bytes if forecast.reserved_bytes is not None else round(USABLE_MEMORY * memory_bytes)
    return max(0, (needed_bytes(forecast) or 0) - limit)


def least_note(plan: RunPlan, memory_bytes: int | None) -> str:
    """Return a sentence on what a rank needs for its share of parameters, gradients and optimizer state, which is known
    for a task that cannot be traced, too. Empty if the parameters are unknown, or in host memory."""
    task, strategy = plan.task, plan.strategy
    held = task.trained_bytes(plan.precision.parameters)
    if held is None or strategy.cpu_offload:
        return ""
    of_classes = plan.optimizer.names_classes or task.own_optimizer  # whose state is not known
    adam = plan.optimizer.kind is OptimizerKind.adamw and not of_classes
    trained = held * (4 if adam else 2)
    least = (trained + 2 * task.frozen_parameters) // strategy.shard_size  # frozen ones may be in bf16
    parts = "parameters, gradients and the state of AdamW" if adam else "parameters and gradients"
    excess = "" if memory_bytes is None or least <= memory_bytes else f"; it has {bytes_text(memory_bytes)}"
    return f"A rank needs at least {bytes_text(least)} for {parts}{excess}."


def is_full(forecast: Forecast, memory_bytes: int) -> bool:
    """Return whether a forecast leaves so little of a GPU's memory that the plan warns of it."""
    return forecast.reserved_bytes is not None and _share(forecast.reserved_bytes, memory_bytes) > FULL_SHARE


def _share(reserved_bytes: int, memory_bytes: int) -> float:
    """Return the fraction of the whole card that a rank takes."""
    return (reserved_bytes + OVERHEAD_BYTES) / (memory_bytes + OVERHEAD_BYTES)


def full_notes(plan: RunPlan, remedy: list[str] | None) -> list[str]:
    """Return the warning that a plan leaves too little of a GPU's memory.

    Args:
        remedy: settings with which the job is predicted to fit; empty: none were found; None: none were looked for.
    """
    memory = plan.strategy.memory_bytes
    forecast = next(each for each in plan.strategy.forecasts if each.sync is plan.strategy.sync)
    if memory is None or forecast.reserved_bytes is None:
        return []
    if not is_full(forecast, memory):
        return []
    card, share = memory + OVERHEAD_BYTES, _share(forecast.reserved_bytes, memory)
    name = "the GPU here" if plan.cluster.gpu is None else f"cluster.gpu={plan.cluster.gpu}"
    start = f"A rank is predicted to need {share:.0%} of the {bytes_text(card)} of {name}"
    if not (excess := excess_bytes(forecast, memory)):
        return [f"{start}, above {FULL_SHARE:.0%}: what is not predicted may end the run."]
    if remedy:
        return [f"{start}: it does not fit, by {bytes_text(excess)}. It fits with {' '.join(remedy)}."]
    start = f"{start}: it does not fit, by {bytes_text(excess)}."
    if remedy is None:
        if plan.cluster.gpu is not None:
            return [f"{start} `launch plan` of this job alone looks for settings with which it does."]
        return [f"{start} Try a smaller batch.micro_size, strategy.recompute=blocks, or strategy=fsdp over more ranks."]
    return [
        f"{start} No smaller micro-batch, recomputation or sharding over these ranks is enough. Use more ranks with "
        "strategy=fsdp, or GPUs with more memory."
    ]
