"""Inspection of a task before anything starts: checks that it can be imported and constructed and has data, and
measures its model.

``launcher.plan.task_inspection`` runs it as a separate process, because the command line must not import torch or user
code. Reads one JSON object from standard input; writes the answer to the file named on the command line.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import TaskError
from launcher.process import die_with_parent
from launcher.task import Task, build_model, eval_data, is_mapped, load_task, train_data, users_frames

if TYPE_CHECKING:
    from torch import nn


def probe(target: str, params: dict[str, Any], search_path: list[str], shards: bool, seed: int) -> dict[str, Any]:
    """Return the fields of a TaskPlan. The model is built on the meta device if possible, which takes no memory.

    Args:
        shards: the strategy is sharded, so the task's shard units are used and checked.
        seed: the job's seed, on which the data's length may depend.
    """
    import torch

    from launcher.train.parallel.batchnorm import batch_norms
    from launcher.train.parallel.mixed_precision import matmul_parameters
    from launcher.train.parallel.shard_units import find_units
    from launcher.train.precision import NARROW_DTYPES

    task = load_task(target, params, search_path, seed)
    notes: list[str] = []
    data = train_data(task, seed, notes)
    eval_data(task, seed, notes)
    samples = len(data) if is_mapped(data) else None
    if samples is None and not hasattr(data, "__iter__"):
        raise TaskError(
            f"task._target_={target}: train_data() returned a {type(data).__name__} that has no length and cannot be "
            "iterated.\n  Give a map-style dataset (__len__ and __getitem__) or an IterableDataset."
        )
    try:
        # load_state_dict and others warn about meta tensors, which the job's model does not have
        with torch.device("meta"), _without_random_values(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build_model(task, seed)
    except Exception:  # a constructor that uses the values of its tensors needs real ones
        model = build_model(task, seed)
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"task._target_={target}: model() returned a {type(model).__name__}, not a torch.nn.Module.")
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if not trained:
        raise TaskError(
            f"task._target_={target}: model() has no parameter that requires a gradient.\n"
            "  Give it parameters, or unfreeze some (requires_grad_(True))."
        )
    shard_units = getattr(task, "shard_units", None) if shards else None
    units = find_units(model, None if shard_units is None else shard_units(model))
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    multiplied = list(matmul_parameters(model))
    return {
        "target": target,
        "params": params,
        "samples": samples,
        "parameters": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
        "unit_parameters": sum(p.numel() for p in trained if p in in_units),
        "frozen_parameters": sum(p.numel() for p in frozen),
        "frozen_unit_parameters": sum(p.numel() for p in frozen if p in in_units),
        "batch_norms": len(batch_norms(model)),
        "data_notes": tuple(notes),
        "narrow_parameters": sum(p.numel() for p in trained if p.dtype in NARROW_DTYPES),
        "matmul_parameters": sum(p.numel() for p in multiplied),
        "unit_matmul_parameters": sum(p.numel() for p in multiplied if p in in_units),
        "in_eval_mode": in_eval_mode(model),
        "flops_per_sample": _flops(task, model, data),
    }


def _flops(task: Task, model: nn.Module, data: Any) -> float | None:
    """Return a sample's FLOPs; None if the task has a method for them. Called last, because it reads data and runs the
    task's loss."""
    if callable(getattr(task, "flops_per_sample", None)):
        return None
    from launcher.train.measure.flops import flops_per_sample

    return flops_per_sample(task, model, data)


def in_eval_mode(module: nn.Module, name: str = "") -> list[str]:
    """Return the names of the outermost modules in eval mode; an empty name is ``module`` itself."""
    if not module.training:
        return [name]
    prefix = f"{name}." if name else ""
    return [inner for child, part in module.named_children() for inner in in_eval_mode(part, f"{prefix}{child}")]


def _without_random_values() -> AbstractContextManager[object]:
    """Return a mode that skips the random initialisation of meta tensors by nn's layers. Meta tensors have no values,
    but torch imports its compiler for these operators, which takes a second; for other random operators it still
    does."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    draws = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    class WithoutRandomValues(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func in draws and args[0].is_meta else func(*args, **(kwargs or {}))

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Keep torch from wrapping the method above in a function that imports the compiler (test_imports.py)."""
            return False

    return WithoutRandomValues()


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    request = json.load(sys.stdin)
    try:
        result: dict[str, Any] = {"task": probe(**request)}
    except TaskError as error:
        result = {"error": str(error)}
    except Exception as error:  # user code may raise anything
        result = {"error": f"task._target_={request['target']}: {type(error).__name__}: {error}\n{users_frames(error)}"}
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
