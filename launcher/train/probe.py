"""Look at a task before anything starts: does it import, construct, have data, and how large is its model?

Run by ``launcher.taskinfo`` as a process of its own, because the command line must not import torch or user code.
Reads one JSON object from standard input, writes the answer to the file named on the command line.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from launcher.errors import TaskError
from launcher.train.task import load_task


def probe(target: str, params: dict[str, Any], search_path: list[str], shards: bool) -> dict[str, Any]:
    """The fields of a TaskPlan. The model is built on the meta device where it can be, so that size costs nothing.

    ``shards``: whether the task's shard units matter, and must be right.
    """
    import torch

    from launcher.train.norm import batch_norms
    from launcher.train.units import find_units

    task = load_task(target, params, search_path)
    data = task.train_data()
    samples = None if isinstance(data, torch.utils.data.IterableDataset) or not isinstance(data, Sized) else len(data)
    if samples is None and not hasattr(data, "__iter__"):
        raise TaskError(
            f"task._target_={target}: train_data() returned a {type(data).__name__} that has no length and cannot be "
            "iterated.\n  Give a map-style dataset (__len__ and __getitem__) or an IterableDataset."
        )
    try:
        with torch.device("meta"), _without_random_values():
            model = task.model()
    except Exception:  # a constructor that computes with its tensors needs real ones
        model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"task._target_={target}: model() returned a {type(model).__name__}, not a torch.nn.Module.")
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise TaskError(
            f"task._target_={target}: model() has no parameter that requires a gradient.\n"
            "  Give it parameters, or unfreeze some (requires_grad_(True))."
        )
    shard_units = getattr(task, "shard_units", None) if shards else None
    units = find_units(model, None if shard_units is None else shard_units(model))
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    return {
        "target": target,
        "params": params,
        "samples": samples,
        "parameters": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
        "unit_parameters": sum(p.numel() for p in trained if p in in_units),
        "batch_norms": len(batch_norms(model)),
    }


def _without_random_values() -> AbstractContextManager[object]:
    """Meta tensors have none, and yet torch imports its compiler to draw them, which takes a second. Other draws than
    those of nn's layers still do."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    draws = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    class WithoutRandomValues(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func in draws and args[0].is_meta else func(*args, **(kwargs or {}))

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """torch's own; else it wraps the method above in a function that imports the compiler (test_imports.py)."""
            return False

    return WithoutRandomValues()


def _users_frames(error: Exception) -> str:
    """Where in the user's own code it happened."""
    ours = str(Path(__file__).resolve().parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith((ours, "<frozen")) and "importlib" not in frame.filename
    ]
    return "".join(traceback.format_list(theirs)).rstrip()


def main() -> None:
    request = json.load(sys.stdin)
    try:
        result: dict[str, Any] = {"task": probe(**request)}
    except TaskError as error:
        result = {"error": str(error)}
    except Exception as error:  # user code may raise anything
        result = {
            "error": f"task._target_={request['target']}: {type(error).__name__}: {error}\n{_users_frames(error)}"
        }
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
