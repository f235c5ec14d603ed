"""Memory limit of a rank: which forecasts fit, and the warning of a plan that does not fit."""

from __future__ import annotations

from launcher.config.schema import Device, OptimizerKind
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.quantities import bytes_text

# Fraction of a rank's memory that tensors may take. The rounding and the fragments of torch's caching allocator and
# the buffers of the communication library need the rest.
USABLE_MEMORY = 0.92


def excess_bytes(forecast: Forecast, memory_bytes: int) -> int:
    """Return the bytes by which a forecast exceeds what a rank may use; 0 if it fits or is not known.

    Args:
        memory_bytes: of the device, on a GPU without what CUDA and NCCL take.
    """
    return max(0, (forecast.peak_bytes or 0) - round(USABLE_MEMORY * memory_bytes))


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


def excess_notes(plan: RunPlan) -> list[str]:
    """Return the warning that a plan does not fit into a GPU's memory."""
    forecast, memory = plan.strategy.forecast, plan.strategy.memory_bytes
    if forecast is None or forecast.peak_bytes is None or memory is None or plan.cluster.device is not Device.cuda:
        return []
    if not (excess := excess_bytes(forecast, memory)):
        return []
    name = "the GPU here" if plan.cluster.gpu is None else f"cluster.gpu={plan.cluster.gpu}"
    return [
        f"A rank's tensors are predicted to need {bytes_text(forecast.peak_bytes)}; they may take {USABLE_MEMORY:.0%} "
        f"of the {bytes_text(memory)} that {name} has for them: it does not fit, by {bytes_text(excess)}. Try a "
        "smaller batch.micro_size, strategy.recompute=blocks, or strategy=fsdp over more ranks."
    ]
