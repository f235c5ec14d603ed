"""Contents of a checkpoint's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.rundir.paths import STATE
from launcher.train.checkpoint.file_format import Reader, SavePlanner, checksums, pickled, write_manifest


def tensors(directory: Path) -> dict[str, Tensor]:
    entries = Reader(directory).read_metadata().state_dict_metadata.items()
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def assert_same_tensors(mine: Path, wanted: Path) -> None:
    """Two checkpoints hold the same tensors, bit by bit."""
    found, others = tensors(mine), tensors(wanted)
    assert found.keys() == others.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, others[name])] == []


def make_checkpoint(directory: Path, model: dict[str, Any], **more: Any) -> Path:
    """Write a checkpoint with this model's state in one process, and return its directory."""
    directory.mkdir(parents=True)
    writer = dcp.FileSystemWriter(directory)
    model = {name: value if isinstance(value, Tensor) else pickled(value) for name, value in model.items()}
    dcp.save({"model": model, **more}, storage_writer=writer, planner=SavePlanner(), no_dist=True)
    (directory / STATE).write_text("{}")
    write_manifest(directory, checksums(sorted(directory.iterdir())))
    return directory
