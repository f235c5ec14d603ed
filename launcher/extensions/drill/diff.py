"""Comparison of two checkpoints, tensor by tensor, printed as JSON: used by `launch drill`.

    python -m launcher.extensions.drill.diff CHECKPOINT REFERENCE PARENT_PID

One process reads both, regardless of the number of ranks that wrote them, a few tensors at a time.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.extensions.drill.verdict import Difference
from launcher.process import die_with_parent
from launcher.train.checkpoint.file_format import STREAM_KEY, Reader, read_values

_BATCH_BYTES = 1 << 28
# stands for a difference that is nan or infinite: JSON has neither, and the square of this is still finite
_INFINITE = 1e100


def diff_checkpoints(directory: Path, reference: Path) -> Difference:
    """Return the difference in all tensors (parameters, buffers, the optimizer's state, each rank's random state), and
    the optimizer's other values."""
    ours, theirs = (Reader(path).read_metadata().state_dict_metadata for path in (directory, reference))
    # the state of a stream may describe the same position in another way after a resume
    compared = (name for name in {*ours, *theirs} if not name.startswith(STREAM_KEY))
    names = sorted(compared, key=lambda name: (not name.startswith("model."), name))
    unmatched = {name for name in names if _kind(ours.get(name)) != _kind(theirs.get(name))}
    diff = Difference(tensors=len(names), differing=len(unmatched))
    squares = total = 0.0
    for batch in _batches([name for name in names if name not in unmatched], theirs):
        values, expected = (_read(path, batch, theirs) for path in (directory, reference))
        for name in batch:
            a, b = values[name], expected[name]
            parameter = name.startswith("model.")
            if isinstance(b, Tensor) and parameter:
                total += float(b.double().nan_to_num(0, 0, 0).square().sum())
            if _same(a, b):
                continue
            diff.differing += 1
            diff.first = diff.first or name
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                off = (a.double() - b.double()).abs().nan_to_num(_INFINITE, _INFINITE)
                most, scale = float(off.max()), float(b.double().abs().nan_to_num(0, 0).max())
                diff.absolute = max(diff.absolute, most)
                diff.relative = max(diff.relative, most / scale if scale else float(most > 0))
                squares += float(off.square().sum()) if parameter else 0.0
    diff.first = diff.first or next((name for name in names if name in unmatched), None)
    diff.norm = (squares / total) ** 0.5 if total else float(squares > 0)
    return diff


def _kind(entry: Any) -> Any:
    """Return a tensor's shape and dtype, otherwise the name of its type; NoneType if there is none."""
    return (entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else type(entry).__name__


def _batches(names: list[str], entries: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the names in batches of about ``_BATCH_BYTES``."""
    batch: list[str] = []
    size = 0
    for name in names:
        entry = entries[name]
        batch.append(name)
        size += entry.size.numel() * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0
        if size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(directory: Path, names: list[str], entries: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry := entries[name], TensorStorageMetadata)
        else None
        for name in names
    }
    read_values(state, directory, no_dist=True)
    return state


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal bit by bit: nan can equal itself, and minus zero differs from zero."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))
    return type(a) is type(b) and repr(a) == repr(b)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is disabled" is intended here
        print(json.dumps(asdict(diff_checkpoints(Path(sys.argv[1]), Path(sys.argv[2])))))
