"""Reading a checkpoint back into a fresh engine: of the same ranks bit by bit, of others what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

from launcher.config import Compress, LrScaling
from launcher.paths import read_json
from launcher.plan import RunPlan
from launcher.train import contents, elastic
from launcher.train.calibration import measured_as
from launcher.train.contract import require_same_model, require_same_run
from launcher.train.engine import Engine
from launcher.train.randomness import restore_random_state
from launcher.train.safeload import Planner, Reader

# how an optimizer computes here: of this machine, and no part of what it computes
_HOW = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class Restored:
    """``run``: what was saved beside the engine. ``origin``: what the checkpoint says of its plan. ``ranks``: how many
    saved it. ``alike``: whether what was measured then, a step's time and what it sends, would be the same now."""

    run: dict[str, Any]
    origin: dict[str, Any]
    ranks: int
    alike: bool

    def other_commit(self, commit: str | None) -> str | None:
        """The one whose code has saved it; None where that is ``commit``, or one of the two is not known."""
        saved_by = self.run.get("account", {}).get("commit")
        return saved_by if commit and saved_by != commit else None


def load(engine: Engine, directory: Path) -> Restored:
    """Put a fresh engine back to where ``checkpoint.snapshot`` was called, by as many ranks or others, under the same
    strategy or another one. All ranks call it.

    Raises:
        WrongCheckpoint: it is of another model, or of a plan that is another one in what is learned.
    """
    state = read_json(directory / contents.STATE)
    assert state is not None
    stored = Reader(directory).read_metadata()
    origin, saved, plan = state.get("origin", {}), state["engine"], engine.plan
    require_same_run(directory, origin, saved["place"]["index"], plan)
    buffers = dict(engine.parallel.module.named_buffers())
    tensors = contents.tensors(engine, [name for name in saved["changing_buffers"] if name in buffers])
    unknown = [name for name in saved["changing_buffers"] if name not in buffers]
    require_same_model(directory, tensors["model"], stored, unknown)

    ranks = elastic.ranks_in(stored)
    same_ranks = ranks == engine.world.size
    random, strategy = contents.random_key(engine), contents.strategy_key(engine)
    tensors[random] = elastic.room(stored, random, engine.device)
    compresses = plan.strategy.compress is Compress.powersgd and engine.world.size > 1
    tensors[strategy] = elastic.room(stored, strategy, engine.device) if same_ranks and compresses else {}
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
        kept = elastic.shared_strategy_state(engine, directory, stored, ranks)
    if kept and compresses:
        engine.parallel.load_state_dict(kept)
    elif kept.get("residue") and engine.world.rank == 0:
        print(elastic.explain_dropped(kept["residue"]), flush=True)
    own = tensors[random]
    if not own or (engine.device.type == "cuda" and "cuda" not in own):  # a new rank, or one that was on a CPU
        elastic.seed_new_rank(engine, engine.steps)
    if own:
        restore_random_state(own, engine.device)
    return Restored(state["run"], origin, ranks, alike)


def _leave_out_unknown(state: dict[str, dict[str, Any]], stored: Metadata) -> None:
    """A parameter that never had a gradient has no optimizer state, and begins without."""
    known = stored.state_dict_metadata
    for parameter in list(state):
        entries = state[parameter]
        for name in [name for name in entries if f"optimizer.state.{parameter}.{name}" not in known]:
            del entries[name]
        if not entries:
            del state[parameter]


def _take_hyperparameters(engine: Engine, plan: RunPlan, *, scheduled: bool) -> None:
    """Keep the optimizer's arguments of the checkpoint, except for those that the user has forced, and set the learning
    rate of the next step by the plan's schedule, which may have another end now.

    Args:
        scheduled: whether that schedule set the rates of the run; else they stay as they are in the checkpoint.
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
