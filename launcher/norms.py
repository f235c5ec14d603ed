"""What ``batch.norm`` means for a model with BatchNorm, in words. No torch."""

from __future__ import annotations

from launcher.batch import Batch
from launcher.config import Norm, Recompute
from launcher.errors import ConfigError


def require_possible(batch: Batch, recompute: Recompute) -> None:
    """Raises ConfigError where activations that are computed again would count twice in a window's statistics."""
    if batch.norm is Norm.window and batch.accumulation > 1 and recompute is not Recompute.none:
        raise ConfigError(
            "batch.norm", batch.norm, f"does not work with strategy.recompute={recompute.value}.",
            "Leave strategy.recompute out, or use batch.norm=sync.",
        )  # fmt: skip


def what_norms_do(layers: int, batch: Batch) -> str | None:
    """One sentence on what the model's ``layers`` BatchNorms normalise by, and what else there is. None without any."""
    if not layers:
        return None
    who = f"{layers} BatchNorm layer{'s' if layers > 1 else ''}"
    if batch.norm is Norm.freeze:
        return f"{who}: batch.norm=freeze, normalised by the running statistics that model() comes with."
    across = batch.micro_size * batch.world_size
    seen = batch.micro_size if batch.norm is Norm.leave else across
    if seen == batch.global_size:
        return f"{who}: batch.norm={batch.norm.value}, statistics of the whole window, which is one micro-batch."
    if batch.norm is Norm.window:
        return (
            f"{who}: batch.norm=window, exact statistics of each window: every micro-batch runs at least {2 * layers} "
            "times more (docs/guides/batchnorm.md)."
        )
    if batch.norm is Norm.sync and batch.world_size == 1:
        return f"{who}: batch.norm=sync has no effect on one rank. batch.norm=window does (docs/guides/batchnorm.md)."
    of = "one rank's micro-batch" if batch.norm is Norm.leave else "a micro-batch over all ranks"
    others = "sync|freeze|window" if batch.norm is Norm.leave and batch.world_size > 1 else "freeze|window"
    return (
        f"{who}: statistics of {seen} samples ({of}), not of the {batch.global_size} of a window, so the gradient is "
        f"not that of one big batch. Other choices: batch.norm={others} (docs/guides/batchnorm.md)."
    )
