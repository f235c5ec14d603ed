"""Checkpoints on torch.distributed.checkpoint: one directory a step, written aside and committed by rename.

A directory called step_NNNNNN is whole. The older ones that `checkpoint.keep` gives up go only after that.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from launcher.paths import RunPaths
from launcher.plan import CheckpointPlan
from launcher.train.engine import Engine


def save(engine: Engine, paths: RunPaths, keep: int | None = None) -> Path:
    """Save parameters, optimizer, schedule, scaler, counters and every rank's random state. All ranks call it.

    Returns the committed directory. Raises OSError when the disk refuses; what was there before is untouched.
    """
    target = paths.checkpoint(engine.steps)
    if target.exists():  # of this very step: it is whole, and saving over it would risk it
        return target
    partial = target.with_name(f".{target.name}.partial")
    if engine.world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait(engine)
    dcp.save(_state(engine), checkpoint_id=partial)
    if engine.world.rank == 0:
        partial.rename(target)
        _sync_directory(target.parent)
        for old in _committed(paths)[: -keep if keep else 0]:
            shutil.rmtree(old)
    _wait(engine)
    return target


def load(engine: Engine, directory: Path) -> None:
    """Put the engine back to where ``save`` was called. All ranks call it."""
    state = _state(engine) | _kept_by_strategy(engine, directory)
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        engine.parallel.module, engine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    engine.load_state_dict(state["engine"])
    if (kept := state.get(_strategy_key(engine))) is not None:
        engine.parallel.load_state_dict(kept)
    _restore_random_state(state[_random_key(engine)])


def _state(engine: Engine) -> dict[str, Any]:
    model, optimizer = get_state_dict(engine.parallel.module, engine.optimizer)
    state = {
        "model": model,
        "optimizer": optimizer,
        "engine": engine.state_dict(),
        _random_key(engine): _random_state(engine.device),
    }
    kept = engine.parallel.state_dict()
    return state | {_strategy_key(engine): kept} if kept else state


def _kept_by_strategy(engine: Engine, directory: Path) -> dict[str, Any]:
    """Room for what the strategy of this rank had kept. A fresh engine does not have it yet: the checkpoint says."""
    prefix = f"{_strategy_key(engine)}."
    kept: dict[str, Any] = {}
    for name, entry in dcp.FileSystemReader(directory).read_metadata().state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        *parents, last = _path(name.removeprefix(prefix))
        place = kept
        for parent in parents:
            place = place.setdefault(parent, {})
        tensor = isinstance(entry, TensorStorageMetadata)
        place[last] = torch.empty(entry.size, dtype=entry.properties.dtype, device=engine.device) if tensor else None
    return {_strategy_key(engine): kept} if kept else {}


def _path(name: str) -> list[str]:
    """A strategy's state is numbers by name, or tensors by kind and then by the parameter's dotted name."""
    kind, _, parameter = name.partition(".")
    return [kind, parameter] if parameter else [kind]


def _strategy_key(engine: Engine) -> str:
    return f"strategy_rank{engine.world.rank}"


def _random_key(engine: Engine) -> str:
    return f"random_rank{engine.world.rank}"


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _committed(paths: RunPaths) -> list[Path]:
    return sorted(paths.checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def _wait(engine: Engine) -> None:
    if engine.world.size > 1:
        dist.barrier()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Cadence:
    """When to save: every so many steps, or minutes by rank 0's clock."""

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._last = time.monotonic()

    def due(self, engine: Engine) -> bool:
        """Asked after each step, by all ranks."""
        if not self._plan.enabled:
            return False
        by_step = self._plan.every is not None and engine.steps % self._plan.every == 0
        return by_step or self._by_clock(engine)

    def _by_clock(self, engine: Engine) -> bool:
        if self._plan.every_minutes is None:
            return False
        late = torch.tensor([time.monotonic() - self._last >= 60 * self._plan.every_minutes], dtype=torch.uint8)
        if engine.world.size > 1:
            dist.broadcast(late, 0)
        return bool(late.item())

    def saved(self) -> None:
        self._last = time.monotonic()
