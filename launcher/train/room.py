"""Whether the disk takes checkpoints: asked before the first step, and said when it does not."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from launcher.config import Compress, OnError, OptimizerKind
from launcher.errors import CheckpointFailed
from launcher.sizes import in_words
from launcher.train.engine import Engine

_PROBE_BYTES = 1 << 16
# state.json, the manifest and what describes the tensors
_BESIDE_BYTES = 1 << 17


def predicted_bytes(engine: Engine) -> int:
    """Of one checkpoint, all ranks' files together: parameters, buffers, and the optimizer's state of each trained
    parameter (AdamW: two moments; SGD: its momentum), and PowerSGD's residue, a whole gradient on each rank."""
    optimizer, module = engine.plan.optimizer, engine.parallel.module
    moments = 2 if optimizer.kind is OptimizerKind.adamw else int(optimizer.momentum > 0)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    residues = engine.world.size if engine.plan.strategy.compress is Compress.powersgd else 0
    whole = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return whole + trained * (moments + residues) + _BESIDE_BYTES


def free_bytes(place: Path) -> int | None:
    """On the disk of ``place``, or of the nearest directory above that is there; None where that cannot be told."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None  # some file systems of the network count nothing


def require(engine: Engine, directory: Path, *, has_one: bool) -> None:
    """Write a small file where checkpoints are to lie, for good, and take it away again. All ranks call it.

    Args:
        has_one: the run goes on from a checkpoint: then checkpoint.on_error has its say.

    Raises:
        CheckpointFailed: on all ranks, where that cannot be done, or where a checkpoint is larger than what is free.
    """
    world = engine.world
    problem = world.of_rank_0(_problem(directory, predicted_bytes(engine)) if world.rank == 0 else None)
    if problem is None:
        return
    said = f"Checkpoints cannot be written to {directory}: {problem}\n"
    if not has_one or engine.plan.checkpoint.on_error is OnError.stop:
        raise CheckpointFailed(
            f"{said}  No step was taken. Make room, choose another run.dir, or train without: checkpoint.enabled=false."
        )
    if world.rank == 0:
        print(f"{said}  Training goes on from what there is (checkpoint.on_error=continue).", flush=True)


def _problem(directory: Path, wanted: int) -> str | None:
    probe = directory / f".probe.{secrets.token_hex(4)}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error}."
    finally:
        with suppress(OSError):  # what it would say has been said
            probe.unlink(missing_ok=True)
    free = free_bytes(directory)
    if free is not None and free < wanted:
        return f"one needs about {in_words(wanted)}, and {in_words(free)} are free on that disk."
    return None
