"""What a checkpoint keeps of each rank by itself, read back by another number of ranks, or another strategy.

At the same world every rank has its own back, bit by bit. At another one:

- Random state: a rank whose number was there has its own; a new one begins a stream of its own, made from seed, rank
  and step.
- PowerSGD's residue: what is kept back of the gradients so far is the sum over the ranks, and that sum stays what it
  is. The gradients of W ranks are averaged and then multiplied by W (launcher/train/engine.py), so each of W' ranks
  takes ``sum over the old ranks / W'``. The factors are alike on all ranks.
- PowerSGD to a strategy without it: nowhere to put the residue, which is dropped and said to be.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher.train.engine import Engine
from launcher.train.randomness import seed_everything
from launcher.train.safeload import Planner, Reader


def seed_new_rank(engine: Engine, step: int) -> None:
    """Dropout of its own for a rank that the checkpoint does not know: another one at each step that it may come at."""
    text = f"{engine.plan.train.seed}/{engine.world.rank}/{step}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    seed_everything(int.from_bytes(digest, "little"))


def room(stored: Metadata, key: str, device: torch.device) -> dict[str, Any]:
    """Room for what is kept of one rank alone. A fresh engine does not know what that is: the checkpoint says."""
    prefix = f"{key}."
    kept: dict[str, Any] = {}
    for name, entry in stored.state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        *parents, last = _path(name.removeprefix(prefix))
        place = kept
        for parent in parents:
            place = place.setdefault(parent, {})
        tensor = isinstance(entry, TensorStorageMetadata)
        place[last] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device) if tensor else None
    return kept


def _path(name: str) -> list[str]:
    """A rank's state is numbers and tensors by name, or tensors by kind and then by the parameter's dotted name."""
    kind, _, parameter = name.partition(".")
    return [kind, parameter] if parameter else [kind]


def ranks_in(stored: Metadata) -> int:
    """How many ranks saved the checkpoint: each has random state of its own."""
    names = {name.partition(".")[0] for name in stored.state_dict_metadata}
    return sum(name.startswith("random_rank") for name in names)


def shared_strategy_state(engine: Engine, directory: Path, stored: Metadata, ranks: int) -> dict[str, Any]:
    """The strategy's state for this rank, from that of ``ranks`` others, which are read one at a time. Empty where they
    had none. All ranks call it, and each reads all of it for itself."""
    together: dict[str, Any] = {}
    for rank in range(ranks):
        key = f"strategy_rank{rank}"
        one = {key: room(stored, key, engine.device)}
        if not one[key]:
            return {}
        dcp.load(one, storage_reader=Reader(directory), planner=Planner())
        if not rank:
            together = one[key]
            continue
        for name, residue in one[key].get("residue", {}).items():
            together["residue"][name] += residue
    for residue in together.get("residue", {}).values():
        residue /= engine.world.size
    return together


def explain_dropped(residue: dict[str, Tensor]) -> str:
    """Of the sum over all ranks, divided by their number: what is lost with it."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.float()) for part in residue.values()]))
    return (
        f"PowerSGD had kept back a part of the gradients so far (norm {norm.item():.3g} a rank, of {len(residue)} "
        "parameters), and without strategy.compress=powersgd on two or more ranks nothing can take it up: it is lost."
    )
