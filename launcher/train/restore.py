"""Reading a checkpoint back into a fresh engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_state_dict

from launcher.paths import read_json
from launcher.train import contents
from launcher.train.engine import Engine
from launcher.train.randomness import restore_random_state
from launcher.train.safeload import Planner, Reader


def load(engine: Engine, directory: Path) -> dict[str, Any]:
    """Put a fresh engine back to where ``checkpoint.save`` was called. All ranks call it. Returns ``run`` of then."""
    state = read_json(directory / contents.STATE)
    assert state is not None
    tensors = contents.tensors(engine, state["engine"]["changing_buffers"])
    tensors |= {
        key: _room(engine, directory, key) for key in (contents.random_key(engine), contents.strategy_key(engine))
    }
    dcp.load(tensors, storage_reader=Reader(directory), planner=Planner())
    set_state_dict(
        engine.parallel.module, engine.optimizer,
        model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"],
    )  # fmt: skip
    engine.load_state_dict(state["engine"])
    if kept := tensors[contents.strategy_key(engine)]:
        engine.parallel.load_state_dict(kept)
    if random := tensors[contents.random_key(engine)]:
        restore_random_state(random, engine.device)
    return state["run"]


def _room(engine: Engine, directory: Path, key: str) -> dict[str, Any]:
    """Room for what is kept of this rank alone. A fresh engine does not know what that is: the checkpoint says."""
    prefix = f"{key}."
    kept: dict[str, Any] = {}
    for name, entry in Reader(directory).read_metadata().state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        *parents, last = _path(name.removeprefix(prefix))
        place = kept
        for parent in parents:
            place = place.setdefault(parent, {})
        tensor = isinstance(entry, TensorStorageMetadata)
        place[last] = torch.empty(entry.size, dtype=entry.properties.dtype, device=engine.device) if tensor else None
    return kept


def _path(name: str) -> list[str]:
    """A rank's state is numbers and tensors by name, or tensors by kind and then by the parameter's dotted name."""
    kind, _, parameter = name.partition(".")
    return [kind, parameter] if parameter else [kind]
