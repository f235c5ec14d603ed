"""Loading of a checkpoint into a fresh engine, with the same or another number of ranks, if the plan allows it.

With the same world size, every rank's state is restored bit by bit. With another one:

- Random state: a rank whose number existed gets its own state back; a new rank gets a stream seeded by seed, rank and
  step.
- PowerSGD's residue: the sum over the ranks is preserved. The gradients of W ranks are averaged and then multiplied by
  W (launcher/train/engine/engine.py), so each of W' ranks takes ``sum over the old ranks / W'``. The factors are the
  same on all ranks.
- From PowerSGD to a strategy without it: the residue is dropped, with a message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

from launcher.config.schema import Compress, LrScaling
from launcher.errors import WrongCheckpoint
from launcher.plan import windows
from launcher.plan.batch import Batch, Stage
from launcher.plan.resumable import Change, refusals
from launcher.plan.run_plan import RunPlan
from launcher.rundir import paths
from launcher.rundir.files import read_json
from launcher.task import seed_everything
from launcher.train.checkpoint import contents
from launcher.train.checkpoint.file_format import Planner, Reader
from launcher.train.data.randomness import restore_random_state
from launcher.train.engine.calibration import measured_as
from launcher.train.engine.engine import Engine

# options that choose an optimizer's implementation, not its results: the present machine's are kept
_HOW = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class Restored:
    """Result of loading a checkpoint.

    Args:
        run: the caller's data that was passed to ``take_snapshot``.
        origin: description of the plan under which it was saved, see ``contents.origin``.
        ranks: number of ranks that saved it.
        alike: measurements taken then (step time, bytes sent) are still valid under this plan.
    """

    run: dict[str, Any]
    origin: dict[str, Any]
    ranks: int
    alike: bool

    def other_commit(self, commit: str | None) -> str | None:
        """Return the commit whose code saved the checkpoint; None if it is ``commit``, or if one is not known."""
        saved_by = self.run.get("account", {}).get("commit")
        return saved_by if commit and saved_by != commit else None


def load(engine: Engine, directory: Path) -> Restored:
    """Restore the state that the engine had at ``save.take_snapshot``, saved by the same or another number of ranks,
    under the same or another strategy. All ranks call it, with a fresh engine.

    Raises:
        WrongCheckpoint: it is of another model, or of a plan whose training result would differ.
    """
    state = read_json(directory / paths.STATE)
    assert state is not None
    stored = Reader(directory).read_metadata()
    origin, saved, plan = state.get("origin", {}), state["engine"], engine.plan
    require_same_run(directory, origin, saved["place"]["index"], plan)
    buffers = dict(engine.parallel.module.named_buffers())
    tensors = contents.tensors(engine, [name for name in saved["changing_buffers"] if name in buffers])
    unknown = [name for name in saved["changing_buffers"] if name not in buffers]
    require_same_model(directory, tensors["model"], stored, unknown)

    ranks = ranks_in(stored)
    same_ranks = ranks == engine.world.size
    random, strategy = contents.random_key(engine), contents.strategy_key(engine)
    tensors[random] = room(stored, random, engine.device)
    compresses = plan.strategy.compress is Compress.powersgd and engine.world.size > 1
    tensors[strategy] = room(stored, strategy, engine.device) if same_ranks and compresses else {}
    _leave_out_unknown(tensors["optimizer"]["state"], stored)
    how = [{name: group.get(name) for name in _HOW} for group in engine.optimizer.param_groups]
    dcp.load(tensors, storage_reader=Reader(directory), planner=Planner())
    set_state_dict(
        engine.parallel.module, engine.optimizer,
        model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"],
        options=StateDictOptions(strict=False),  # the model's names were compared; a parameter may have no state
    )  # fmt: skip
    for group, own in zip(engine.optimizer.param_groups, how, strict=True):
        group.update({name: value for name, value in own.items() if name in group})
    now = measured_as(plan)
    alike = same_ranks and saved.get("measured_as", now) == now
    engine.load_state_dict(saved, alike=alike, same_order=same_ranks)
    _take_hyperparameters(engine, plan, scheduled=saved.get("follows_plan", True))

    kept = tensors[strategy]
    if not same_ranks or not compresses:
        kept = shared_strategy_state(engine, directory, stored, ranks)
    if kept and compresses:
        engine.parallel.load_state_dict(kept)
    elif kept.get("residue") and engine.world.rank == 0:
        print(explain_dropped(kept["residue"]), flush=True)
    own = tensors[random]
    if not own or (engine.device.type == "cuda" and "cuda" not in own):  # a new rank, or one saved on a CPU
        seed_new_rank(engine, engine.steps)
    if own:
        restore_random_state(own, engine.device)
    return Restored(state["run"], origin, ranks, alike)


def _leave_out_unknown(state: dict[str, dict[str, Any]], stored: Metadata) -> None:
    """Remove the entries that the checkpoint lacks: a parameter that never had a gradient has no optimizer state."""
    known = stored.state_dict_metadata
    for parameter in list(state):
        entries = state[parameter]
        for name in [name for name in entries if f"optimizer.state.{parameter}.{name}" not in known]:
            del entries[name]
        if not entries:
            del state[parameter]


def _take_hyperparameters(engine: Engine, plan: RunPlan, *, scheduled: bool) -> None:
    """Keep the optimizer's arguments from the checkpoint, except for those that the user forced, and set the next
    step's learning rate by the plan's schedule, whose length may have changed.

    Args:
        scheduled: the plan's schedule set the run's learning rates; otherwise those of the checkpoint are kept.
    """
    groups, optimizer = engine.optimizer.param_groups, plan.optimizer
    forced = {name for group, _, name in (key.partition(".") for key in plan.forced) if group == "optimizer"}
    resized = "batch.global_size" in plan.forced and optimizer.lr_scaling is not LrScaling.none
    if resized or forced & {"lr_scaling", "reference_batch"}:
        forced |= {"lr", "betas", "eps"}
    if "lr" in forced:
        engine.schedule.base_lrs = [optimizer.lr for _ in groups]
    for name in forced - {"lr", "lr_scaling", "reference_batch"}:
        for parameters in groups:
            if name in parameters:
                parameters[name] = getattr(optimizer, name)
    if not scheduled:
        return
    factor = plan.schedule.factor(engine.steps, plan.schedule_steps)
    rates = [base * factor for base in engine.schedule.base_lrs]
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    engine.schedule._last_lr = rates


def seed_new_rank(engine: Engine, step: int) -> None:
    """Seed a rank that the checkpoint has no random state for, by the job's seed, its rank and ``step``."""
    text = f"{engine.plan.train.seed}/{engine.world.rank}/{step}"
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    seed_everything(int.from_bytes(digest, "little"))


def room(stored: Metadata, key: str, device: torch.device) -> dict[str, Any]:
    """Return empty tensors (and None for other values) for the state of one rank under ``key``. Names and shapes come
    from the checkpoint, since a fresh engine does not know them."""
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
    """Split the name of an entry in a rank's state: either a plain name, or a kind and a parameter's dotted name."""
    kind, _, parameter = name.partition(".")
    return [kind, parameter] if parameter else [kind]


def ranks_in(stored: Metadata) -> int:
    """Return how many ranks saved the checkpoint, which is the number of random states in it."""
    names = {name.partition(".")[0] for name in stored.state_dict_metadata}
    return sum(name.startswith("random_rank") for name in names)


def shared_strategy_state(engine: Engine, directory: Path, stored: Metadata, ranks: int) -> dict[str, Any]:
    """Return the strategy's state for this rank, combined from that of the ``ranks`` ranks that saved; empty if they
    had none. All ranks call it; each reads the state of all ranks, one at a time."""
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
    """Return the message that PowerSGD's residue is lost. ``residue``: its sum over all ranks, divided by the number of
    ranks."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.float()) for part in residue.values()]))
    return (
        f"PowerSGD had kept back a part of the gradients so far (norm {norm.item():.3g} a rank, of {len(residue)} "
        "parameters), and without strategy.compress=powersgd on two or more ranks nothing can take it up: it is lost."
    )


_SHOWN = 4


def require_same_run(directory: Path, origin: Mapping[str, Any], index: int, plan: RunPlan) -> None:
    """Check that a run with this plan may resume from the checkpoint.

    Args:
        origin: the plan under which it was saved, see ``contents.origin``; empty in checkpoints of early versions.
        index: number of the next window.

    Raises:
        WrongCheckpoint: the plans differ in what affects the training result, and the user has not forced the change.
    """
    if not origin:
        return
    changes, lines = _changes(origin, plan), list[str]()
    old = _batch(origin, plan.batch)
    if windows.past(old, index) != windows.past(plan.batch, index):
        lines.append(
            f"batch.global_size={plan.batch.global_size} (was {old.global_size}): the {index} windows so far had other "
            "sizes than the plan says, so their samples cannot be counted; give the change to `launch resume`"
        )
    elif windows.future(old, index) != windows.future(plan.batch, index):
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
    """Check that the checkpoint is of this model.

    Args:
        model: this run's model state by name.
        unknown: names of non-persistent buffers that are in the checkpoint and not in this model.

    Raises:
        WrongCheckpoint: the names or shapes of parameters and buffers differ.
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
