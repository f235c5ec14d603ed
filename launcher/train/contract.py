"""Whether a checkpoint is one that this plan can go on from: same samples in the same order, same update rule, same
model. What differs is the user's plan, not damage, so no older checkpoint is looked for: it would differ too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher import rebatch
from launcher.batch import Batch, Stage
from launcher.errors import WrongCheckpoint
from launcher.plan import RunPlan
from launcher.resumable import Change, refusals

_SHOWN = 4


def require_same_run(directory: Path, origin: Mapping[str, Any], index: int, plan: RunPlan) -> None:
    """
    Args:
        origin: what the checkpoint says of the plan that it was saved under, as ``contents.origin`` has it; empty in
            one that was written before it did.
        index: of the window that comes next.

    Raises:
        WrongCheckpoint: the plan is another one in what is learned, and the user has not insisted on that.
    """
    if not origin:
        return
    changes, lines = _changes(origin, plan), list[str]()
    old = _batch(origin, plan.batch)
    if rebatch.past(old, index) != rebatch.past(plan.batch, index):
        lines.append(
            f"batch.global_size={plan.batch.global_size} (was {old.global_size}): the {index} windows so far had other "
            "sizes than the plan says, so their samples cannot be counted; give the change to `launch resume`"
        )
    elif rebatch.future(old, index) != rebatch.future(plan.batch, index):
        key = "batch.ramp" if old.global_size == plan.batch.global_size else "batch.global_size"
        given = [_size(batch) if key == "batch.global_size" else _ramp(batch) for batch in (old, plan.batch)]
        changes.append(Change(key, *given))
    lines += refusals(changes, plan.forced)
    if lines:
        raise WrongCheckpoint(
            f"{directory} was saved under another plan than this one:\n  "
            + "\n  ".join(lines)
            + "\n  `launch resume RUN` goes on with the run's own plan, and `launch resume RUN key=value` changes it."
        )


def _changes(origin: Mapping[str, Any], plan: RunPlan) -> list[Change]:
    params: dict[str, Any] = json.loads(json.dumps(plan.task.params))
    old: dict[str, Any] = origin["task_params"]
    pairs = [
        Change("task._target_", origin["task_target"], plan.task.target),
        *(Change(f"task.{name}", old.get(name), params.get(name)) for name in sorted({*params, *old})),
        Change("task: samples", origin["samples"], plan.task.samples),
        Change("train.seed", origin["seed"], plan.train.seed),
        Change("batch.short_window", origin["short_window"], plan.epoch.short_window_policy.value),
        Change("optimizer.kind", origin["optimizer"], plan.optimizer.kind.value),
    ]
    return [change for change in pairs if change.before != change.after]


def _batch(origin: Mapping[str, Any], like: Batch) -> Batch:
    ramp = tuple(Stage(windows=windows, global_size=size) for windows, size in origin["ramp"])
    return dataclasses.replace(like, global_size=origin["global_size"], ramp=ramp)


def _size(batch: Batch) -> int:
    return batch.global_size


def _ramp(batch: Batch) -> list[list[int]]:
    return [[stage.windows, stage.global_size] for stage in batch.ramp]


def require_same_model(
    directory: Path, model: Mapping[str, Any], stored: Metadata, unknown: Sequence[str] = ()
) -> None:
    """
    Args:
        model: state by name, as this run's has it.
        unknown: names of buffers that the checkpoint has beside, and this model has not.

    Raises:
        WrongCheckpoint: the checkpoint holds other parameters or buffers, or some of another shape.
    """
    prefix = "model."
    shapes = {
        name.removeprefix(prefix): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in stored.state_dict_metadata.items()
        if name.startswith(prefix)
    }
    wrong: list[str] = []
    for name, value in model.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if name not in shapes:
            wrong.append(f"{name} is not in the checkpoint")
        elif shapes[name] != shape:
            wrong.append(f"{name} has the shape {_as_list(shape)} here, and {_as_list(shapes[name])} in the checkpoint")
    wrong += [f"{name} is in the checkpoint only" for name in [*shapes, *unknown] if name not in model]
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WrongCheckpoint(
            f"{directory} is of another model:\n  "
            + "\n  ".join(wrong[:_SHOWN])
            + f"{more}\n  Give the run the model that it had, or begin one of its own: launch train."
        )


def _as_list(shape: tuple[int, ...] | None) -> str:
    return "of no tensor" if shape is None else str(list(shape))
