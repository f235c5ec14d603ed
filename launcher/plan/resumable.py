"""Rules for resuming with changes: which config keys may differ from the checkpoint's run, defined only here.

`launch resume` applies them to overrides, and loading a checkpoint applies them again. Everything that affects learning
is fixed: samples, their order, the global batch, the update rule. The rest may follow the available machines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

from launcher.config.schema import Config, key_of, known_keys
from launcher.plan.host import without_secrets


class Permission(Enum):
    """Permission to change a key.

    Attributes:
        change: always allowed.
        force: only with --force, because training differs from there on.
        never: the run could not resume.
    """

    change = auto()
    force = auto()
    never = auto()


@dataclass(frozen=True)
class Change:
    """Change of one config key. Values are JSON values."""

    key: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return " -> ".join(shown(without_secrets(value, self.key)) for value in (self.before, self.after))


_OF_THE_UPDATE = "it is part of the update rule"
_OF_THE_RUN = "it identifies the run and its files"
_OF_THE_MIRROR = "W&B stores the run there"
_OF_THE_STATE = "the checkpoint's optimizer state does not fit another one; "
_OF_A_SCHEDULE = "a schedule of your own continues from its saved state; "
# end of a line on a change that --force allows
FORCED = "; --force allows it"
_NEW_RUN = "start a new run: launch train"

# in a plan's forced keys: the run may continue with other data
DATA = "task: data"

# key -> (permission, consequence of a change); a group's entry covers its keys that have none of their own
RULES: dict[str, tuple[Permission, str]] = {
    "cluster": (Permission.change, ""),
    "cluster.kind": (Permission.never, "its code and files are there; " + _NEW_RUN),
    "strategy": (Permission.change, ""),
    "precision": (Permission.change, ""),
    "checkpoint": (Permission.change, ""),
    "checkpoint.init_from": (Permission.never, "the run has started with other parameters; " + _NEW_RUN),
    "batch.micro_size": (Permission.change, ""),
    "batch.accumulation": (Permission.change, ""),
    "batch.uneven": (Permission.change, ""),
    "batch.on_oom": (Permission.change, ""),
    "batch.balance": (Permission.change, ""),
    "batch.global_size": (Permission.force, "it defines what a step and its learning rate mean"),
    "batch.ramp": (Permission.force, "it defines what a step and its learning rate mean"),
    "batch.norm": (Permission.force, "it changes what the model computes"),
    "batch.short_window": (Permission.never, "the windows so far were counted with it; " + _NEW_RUN),
    "optimizer": (Permission.force, _OF_THE_UPDATE),
    "optimizer.kind": (Permission.never, _OF_THE_STATE + _NEW_RUN),
    "optimizer._target_": (Permission.never, _OF_THE_STATE + _NEW_RUN),
    "optimizer.groups": (
        Permission.never,
        "the checkpoint's optimizer state is stored by group: only the arguments of groups may change; " + _NEW_RUN,
    ),
    "schedule": (Permission.force, _OF_THE_UPDATE),
    "schedule._target_": (Permission.never, _OF_A_SCHEDULE + _NEW_RUN),
    "outer": (Permission.force, "it defines what is averaged between sites, and when"),
    "outer.kind": (Permission.never, "the checkpoints of sites differ; " + _NEW_RUN),
    "outer.fragments": (Permission.never, "averages that are under way are of other parts of the model"),
    "outer.delay": (Permission.never, "averages that are under way arrive after it"),
    "outer.group": (Permission.never, "the checkpoints of sites differ; " + _NEW_RUN),
    "train.steps": (Permission.change, ""),
    "train.epochs": (Permission.change, ""),
    "train.on_nonfinite": (Permission.change, ""),
    "train.clip_norm": (Permission.force, _OF_THE_UPDATE),
    "train.seed": (Permission.never, "the order of the samples is drawn from it; " + _NEW_RUN),
    "train.shuffle": (Permission.never, "it is the order of the samples; " + _NEW_RUN),
    "train.data_shards": (Permission.never, "it is the order of the samples; " + _NEW_RUN),
    "train.deterministic": (Permission.change, ""),
    "train.compile": (Permission.change, ""),
    "train.log_every": (Permission.change, ""),
    "train.hang_timeout": (Permission.change, ""),
    "train.straggler_share": (Permission.change, ""),
    "train.eval_every": (Permission.change, ""),
    "train.eval_micro_size": (Permission.change, ""),
    "train.patience": (Permission.change, ""),
    "train.eval_samples": (Permission.change, ""),
    "train.loader_workers": (Permission.change, ""),
    "task": (Permission.force, "another task, or other data, would be learned from here on"),
    "task._target_": (Permission.never, "another model has other parameters; " + _NEW_RUN),
    "callbacks": (Permission.change, ""),
    "notify": (Permission.change, ""),
    "trackers": (Permission.change, ""),
    "tensorboard": (Permission.change, ""),
    "mlflow": (Permission.change, ""),
    "wandb.mode": (Permission.change, ""),
    "wandb.tags": (Permission.change, ""),
    "wandb.notes": (Permission.change, ""),
    "wandb.job_type": (Permission.change, ""),
    "wandb.project": (Permission.never, _OF_THE_MIRROR),
    "wandb.entity": (Permission.never, _OF_THE_MIRROR),
    "wandb.group": (Permission.never, _OF_THE_MIRROR),
    "run.name": (Permission.never, _OF_THE_RUN),
    "run.dir": (Permission.never, _OF_THE_RUN),
    "run.calibrate_s": (Permission.change, ""),
    "sweep": (Permission.never, "it has no effect on an existing run"),
    # properties of the data, not config keys
    "task: order": (Permission.never, "the position in the data is counted in the order of the samples; " + _NEW_RUN),
    "task: samples": (Permission.never, "the position in the data is counted in samples; " + _NEW_RUN),
}


def rule(key: str) -> tuple[Permission, str] | None:
    """Return the rule of a dotted key, or else of its group; None if there is neither."""
    return RULES.get(key) or RULES.get(key.partition(".")[0])


def forced_by(changes: Iterable[Change]) -> tuple[str, ...]:
    """Return the keys of those changes that only --force allows."""
    listed = list(changes)
    return tuple(change.key for change in listed if _judged(change, listed)[0] is Permission.force)


def refusals(changes: Iterable[Change], forced: Container[str]) -> list[str]:
    """Return a line for each forbidden change: key, value, previous value, reason, remedy.

    Args:
        forced: keys whose change the user has forced.
    """
    lines: list[str] = []
    listed = list(changes)
    for change in listed:
        may, why = _judged(change, listed)
        if may is Permission.never or (may is Permission.force and change.key not in forced):
            remedy = FORCED if may is Permission.force else ""
            parts = _arguments_changed(change) if may is Permission.force else []
            lines += [
                f"{each.key}={shown(each.after)} (was {shown(each.before)}): {why}{remedy}."
                for each in parts or [change]
            ]
    return lines


def refusal_text(lines: Sequence[str]) -> str:
    """Return what ``refusals`` has found as one message."""
    forcible = sum(line.endswith(f"{FORCED}.") for line in lines)
    if forcible == len(lines):
        head = "these keys change only with --force when a run resumes"
    elif forcible:
        head = "these keys cannot change when a run resumes, or only with --force"
    else:
        head = "these keys cannot change when a run resumes"
    return f"{head}:\n  " + "\n  ".join(lines)


def _arguments_changed(change: Change) -> list[Change]:
    """Return the changes of single arguments of ``optimizer.groups``; none for another key."""
    if change.key != "optimizer.groups":
        return []
    return [
        Change(f"{change.key}[{number}].{name}", old.get(name), new.get(name))
        for number, (old, new) in enumerate(zip(change.before, change.after, strict=True))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _judged(change: Change, beside: Iterable[Change]) -> tuple[Permission, str]:
    """Return the permission for ``change`` and its reason.

    Args:
        beside: all changes made at once.
    """
    key, before, after = change.key, change.before, change.after
    if key == "strategy.compress" and before == "powersgd":
        return Permission.force, "the residue that PowerSGD keeps of earlier gradients would be lost"
    of_the_scale = key in ("precision.init_scale", "precision.growth_interval")
    if of_the_scale and not any(each.key == "precision.kind" for each in beside):
        return Permission.never, "the loss scale continues from the checkpoint"
    if key == "optimizer.groups" and None not in (before, after) and _members(before) == _members(after):
        return RULES["optimizer"]
    if key == "optimizer.weight_decay" and None in (before, after):  # it decides on the default groups of a class
        return RULES["optimizer.groups"]
    # an argument of a class, or a class instead of one of the plan's schedules
    if (key.startswith("schedule.") and key not in known_keys()) or (
        key == "schedule.kind" and "custom" in (before, after)
    ):
        return Permission.never, _OF_A_SCHEDULE + _NEW_RUN
    if key == "checkpoint.enabled" and not after:
        return Permission.never, "a run resumes from checkpoints only"
    return rule(key) or (Permission.force, "it has no rule")


def _members(groups: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return (match, class) of each group of `optimizer.groups`, which determine its members and its optimizer."""
    return [(group.get("match"), group.get("_target_")) for group in groups]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config by dotted keys. A map that the user fills (cluster.sbatch) is one value, even if empty."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not prefix:
            values |= flat(value, f"{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            values[key] = value
    return values


def as_typed(config: Config) -> dict[str, Any]:
    """Return the config as a nested dict with the keys of the command line."""
    typed: dict[str, Any] = {}
    for name, group in vars(config).items():
        if dataclasses.is_dataclass(group):
            values = {key_of(field): getattr(group, field.name) for field in dataclasses.fields(group)}
            group = {**values.pop("*", {}), **values}
        typed[name] = group
    return typed


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the changes between two nested configs of JSON values."""
    old, new = flat(before), flat(after)
    keys = dict.fromkeys([*new, *old])
    differing = [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
    # an optimizer's or task's keys come and go with its kind: report only the change of kind
    kinds = {
        change.key.partition(".")[0] for change in differing if change.key.endswith(("._target_", "optimizer.kind"))
    }
    return [
        change
        for change in differing
        if change.key.partition(".")[0] not in kinds or change.key.endswith(("._target_", ".kind"))
    ]


def shown(value: Any) -> str:
    """Return a value as the user would type it."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{name}: {_inner(each)}" for name, each in pairs) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inner, cast('Sequence[Any]', value)))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _inner(value: Any) -> str:
    """Return a value inside a list or a dict; a text with special characters in quotes."""
    return f'"{value}"' if isinstance(value, str) and not re.fullmatch(r"[\w.+/@%-]+", value) else shown(value)
