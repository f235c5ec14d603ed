"""Origin of a checkpoint: the plan under which it was saved, and the checks that another plan may resume from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher.config.key_facts import Permission
from launcher.errors import WrongCheckpoint
from launcher.plan import windows
from launcher.plan.batch import Batch, RampStage
from launcher.plan.resumable import Change, changes, refusals, rule
from launcher.plan.run_plan import RunPlan, part
from launcher.quantities import first_lines
from launcher.train.checkpoint.file_format import CHECKPOINT_FORMAT, entries_under
from launcher.train.checkpoint.initial import ModelState, misfits
from launcher.train.checkpoint.weights import StoredTensor

Origin = dict[str, Any]
_MAX_SHOWN = 4


def origin_of(plan: RunPlan) -> Origin:
    """Return, as JSON, the run of a checkpoint and the part of its plan that another plan must match to resume it.

    In samples: ``global_size`` of all sites, ``samples`` (of an epoch; None: a stream), and ``ramp`` (a list of
    [windows, samples]). ``learning``, ``time``: values of the keys that affect what is learned, and a step's time.
    """
    return {
        "format": CHECKPOINT_FORMAT,
        "run_id": plan.run.id,  # also the run's id in W&B
        "launcher_version": plan.run.version,
        "torch_version": torch.__version__,
        "world_size": plan.batch.world_size,
        "sites": plan.batch.sites,
        "global_size": plan.batch.of_all_sites.global_size,
        "ramp": _ramp(plan.batch.of_all_sites),
        "samples": plan.task.samples,
        "order": order_of(plan),
        "learning": part(plan, "learning"),
        "time": part(plan, "time"),
    }


def order_of(plan: RunPlan) -> str:
    """Return the kind of order that an epoch's samples have: of the task, of the dataset, or random."""
    if plan.task.own_order:
        return "the task's own order"
    return "shuffled" if plan.train.shuffle else "the dataset's order"


def _ramp(batch: Batch) -> list[list[int]]:
    return [[stage.windows, stage.global_size] for stage in batch.ramp]


def require_same_run(directory: Path, origin: Origin, index: int, plan: RunPlan) -> None:
    """Check that a run with this plan may resume from the checkpoint.

    Args:
        origin: origin of the checkpoint.
        index: number of the next window.

    Raises:
        WrongCheckpoint: the plans differ in what affects the training result, and the user has not forced the change.
    """
    differing, problems = _changes(origin, plan), list[str]()
    stages = tuple(RampStage(windows=count, global_size=size) for count, size in origin["ramp"])
    new = plan.batch.of_all_sites
    old = dataclasses.replace(new, global_size=origin["global_size"], ramp=stages)
    if windows.past(old, index) != windows.past(new, index):
        problems.append(
            f"batch.global_size={new.global_size} (was {old.global_size}): the {index} windows so far had other "
            "sizes than the plan says, so their samples cannot be counted; give the change to `launch resume`"
        )
    elif windows.future(old, index) != windows.future(new, index):
        if old.global_size == new.global_size:
            differing.append(Change("batch.ramp", _ramp(old), _ramp(new)))
        else:
            differing.append(Change("batch.global_size", old.global_size, new.global_size))
    problems += refusals(differing, plan.forced)
    if problems:
        raise WrongCheckpoint(
            f"{directory} was saved under another plan than this one:\n  "
            + "\n  ".join(problems)
            + "\n  `launch resume RUN` resumes with the run's own plan, and `launch resume RUN key=value` changes it."
        )


def _changes(origin: Origin, plan: RunPlan) -> list[Change]:
    """Return the changes of what no resume may change, and of the task. Those that --force allows are known from the
    run's config; groups are compared with the optimizer's own."""
    differing = changes(origin["learning"], part(plan, "learning"))
    data = [
        Change("task: samples", origin["samples"], plan.task.samples),
        Change("task: order", origin["order"], order_of(plan)),
    ]
    return [
        *(change for change in data if change.before != change.after),
        *(
            change
            for change in differing
            if change.key.startswith("task.")
            or (change.key != "optimizer.groups" and rule(change.key).permission is Permission.never)
        ),
    ]


def require_same_model(directory: Path, model: Mapping[str, Any], stored: Metadata, unknown: Sequence[str]) -> None:
    """Check that the checkpoint is of this model.

    Args:
        model: this run's model state by name.
        unknown: names of non-persistent buffers that are in the checkpoint and not in this model.

    Raises:
        WrongCheckpoint: the names or shapes of parameters and buffers differ.
    """
    tensors, others = dict[str, StoredTensor](), set[str]()
    for path, entry in entries_under(stored, "model"):
        if isinstance(entry, TensorStorageMetadata):
            tensors[path[0]] = StoredTensor(tuple(entry.size), entry.properties.dtype)
        else:  # a module's extra state
            others.add(path[0])
    own = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    extra = {name: True for name in model if name not in own}
    problems = misfits(ModelState([([name], value) for name, value in own.items()], extra, []), tensors, others)
    changed = [name for name in extra if name in tensors]
    gone = [name for name in unknown if name not in model]
    problems += first_lines([f"{name} is a tensor on one side only" for name in changed], _MAX_SHOWN)
    problems += first_lines([f"{name} is not in the model" for name in gone], _MAX_SHOWN)
    if problems:
        head = f"{directory} was saved from another model, whose parameters and buffers differ:"
        remedy = "Use the model that the run had, or start a new run: launch train."
        raise WrongCheckpoint("\n  ".join([head, *problems, remedy]))
