"""Optimizer in a checkpoint: its parameter groups, its arguments, and the state of each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from launcher.config.schema import LrScaling
from launcher.errors import WrongCheckpoint
from launcher.quantities import count, first_names
from launcher.train.checkpoint.file_format import entries_under
from launcher.train.engine.engine import Engine
from launcher.train.optimizers import members_of
from launcher.train.schedules import PlanSchedule, base_rates

# options that choose an optimizer's implementation, not its results: the present machine's are kept
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# arguments that schedules other than the plan's may set at each step
_CYCLED = ("lr", "momentum", "betas")


class OptimizerOptions:
    """Arguments and groups of an engine's optimizer before a checkpoint is loaded into it.

    Args:
        groups: parameter groups of the fresh engine's state, with the names of their parameters.
        stored: metadata of the checkpoint.

    Raises:
        WrongCheckpoint: the checkpoint has another number of groups.
    """

    def __init__(self, engine: Engine, directory: Path, groups: Sequence[dict[str, Any]], stored: Metadata) -> None:
        self._engine, self._directory = engine, directory
        self._planned = [dict(group) for group in engine.optimizer.param_groups]
        self._rates = [_plain(rate) for rate in base_rates(engine.schedule)]
        self._members = [set(group["params"]) for group in groups]
        saved = len({path[1] for path, _ in entries_under(stored, "optimizer") if path[0] == "param_groups"})
        if saved != len(groups):
            raise WrongCheckpoint(
                f"{directory} has {count(saved, 'parameter group')}, and the optimizer has {len(groups)}.\n"
                "  Use the same groups, or start a new run."
            )

    @property
    def _forced(self) -> set[str]:
        """Names of the arguments that the user changed with --force."""
        plan = self._engine.plan
        forced = {name for group, _, name in (key.partition(".") for key in plan.forced) if group == "optimizer"}
        resized = "batch.global_size" in plan.forced and plan.optimizer.lr_scaling is not LrScaling.none
        if resized or forced & {"lr_scaling", "reference_batch"}:
            forced |= {"lr", "betas", "eps"}
        return forced

    def require_same_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Check that each parameter is in the group that it was in.

        Args:
            groups: those of the checkpoint, with the names of their parameters.

        Raises:
            WrongCheckpoint: parameters have moved.
        """
        before = {name: number for number, group in enumerate(groups) for name in group["params"]}
        now = {name: number for number, names in enumerate(self._members) for name in names}
        if moved := sorted(name for name in now if before.get(name, now[name]) != now[name]):
            raise WrongCheckpoint(
                f"{self._directory} has {count(len(moved), 'parameter')} in other groups of the optimizer: "
                f"{moved[0]} was in group {before[moved[0]]}, and is in group {now[moved[0]]}"
                f"{'' if len(moved) == 1 else f'; also {first_names(moved[1:])}'}.\n"
                "  Use the same groups in the same order, or start a new run."
            )

    def restore(self, *, scheduled: bool) -> None:
        """Keep the optimizer's arguments from the checkpoint, except for those that the user forced, and set the next
        step's learning rate by the plan's schedule, whose length may have changed. Print which arguments of the
        user's code are therefore not used.

        Args:
            scheduled: the plan's schedule set the run's learning rates; otherwise those of the checkpoint are kept.
        """
        groups, schedule, forced = self._engine.optimizer.param_groups, self._engine.schedule, self._forced
        for group, options in zip(groups, self._planned, strict=True):
            group.update({name: options[name] for name in _IMPLEMENTATION if name in group and name in options})
            changed = options.keys() - {"params", "initial_lr", *_IMPLEMENTATION} if "groups" in forced else forced
            group.update({name: options[name] for name in changed - {"lr"} if name in options})
        if forced & {"lr", "groups"}:
            schedule.base_lrs = [options["initial_lr"] for options in self._planned]
        if scheduled and isinstance(schedule, PlanSchedule):
            schedule.continue_at(self._engine.steps)
        if self._engine.world.rank == 0:
            for line in self._not_used():
                print(line, flush=True)

    def _not_used(self) -> list[str]:
        """Return a line for each argument whose value in the user's code is not that of the checkpoint."""
        engine, schedule = self._engine, self._engine.schedule
        own = isinstance(schedule, PlanSchedule)
        known = set[str]().union(*map(_arguments, members_of(engine.optimizer)))
        ignored = {"lr", *_IMPLEMENTATION, *(() if own else _CYCLED)}
        lines: list[str] = []
        for number, (group, options) in enumerate(zip(engine.optimizer.param_groups, self._planned, strict=True)):
            place = f"engine.optimizer.param_groups[{number}]"
            pairs = [
                (name, _plain(group[name]), _plain(options[name]), f'{place}["{name}"]')
                for name in sorted(known - ignored)
                if name in group and name in options
            ]
            rate = f"engine.schedule.base_lrs[{number}]" if own else f'{place}["lr"]'
            if rates := base_rates(schedule):
                pairs.append(("lr", _plain(rates[number]), self._rates[number], rate))
            lines += [self._line(number, *pair) for pair in pairs if pair[1] != pair[2]]
        return lines

    def _line(self, group: int, name: str, saved: object, value: object, place: str) -> str:
        where = "in a callback's on_start" if self._engine.plan.task.target else "after engine.resume()"
        return (
            f"{name}={saved!r} of the optimizer's group {group} is that of the checkpoint; {value!r} in the code is "
            f"not used. To change it, set {place} = {value!r} {where}."
        )


def _arguments(optimizer: Optimizer) -> set[str]:
    """Return the arguments of an optimizer's class. Other entries of a group are what its steps have counted."""
    return optimizer.defaults.keys() & inspect.signature(type(optimizer)).parameters.keys()


def _plain(value: object) -> object:
    """Return a value that can be compared: numbers for tensors, tuples for lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
