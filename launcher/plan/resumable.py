"""Resuming with changes: which config keys may differ from the checkpoint's run. A key's rule is beside it.

`launch resume` applies them to overrides, and loading a checkpoint applies them again. Everything that affects learning
is fixed: samples, their order, the global batch, the update rule. The rest may follow the available machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.choices import is_added
from launcher.config.key_facts import NEW_RUN, UPDATE, Permission, Resume, forced, key_of, never, typed
from launcher.config.schema import SCHEDULE_STATE, Config, facts_by_key
from launcher.plan.host import without_secrets


@dataclass(frozen=True)
class Change:
    """Change of one config key. Values are JSON values."""

    key: str
    before: Any
    after: Any

    @property
    def text(self) -> str:
        return " -> ".join(typed(without_secrets(value, self.key)) for value in (self.before, self.after))


# end of a line on a change that --force allows
FORCED = "; --force allows it"
# in a plan's forced keys: the run may continue with other data
DATA = "task: data"
# keys of a task's class, and properties of its data
_OF_TASK = {
    "task._target_": never("another model has other parameters; " + NEW_RUN),
    "task: order": never("the position in the data is counted in the order of the samples; " + NEW_RUN),
    "task: samples": never("the position in the data is counted in samples; " + NEW_RUN),
}


def rule(key: str) -> Resume:
    """Return the rule of a dotted key, which may be an argument of its group's class."""
    group, facts = key.partition(".")[0], facts_by_key()
    return _OF_TASK.get(key) or next(facts[name].resume for name in (key, f"{group}.*", group) if name in facts)


def forced_by(changes: Iterable[Change]) -> tuple[str, ...]:
    """Return the keys of the changes that only --force allows."""
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
                f"{each.key}={typed(each.after)} (was {typed(each.before)}): {why}{remedy}."
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


def _judged(change: Change, beside: Iterable[Change]) -> Resume:
    """Return the rule for ``change``, which may depend on the values.

    Args:
        beside: all changes made at once.
    """
    key, before, after = change.key, change.before, change.after
    if key == "strategy.compress" and is_added(key, before):
        return forced(f"the residue that {before} keeps of earlier gradients would be lost")
    of_the_scale = key in ("precision.init_scale", "precision.growth_interval")
    if of_the_scale and not any(each.key == "precision.kind" for each in beside):
        return never("the loss scale continues from the checkpoint")
    if key == "optimizer.groups" and None not in (before, after) and _members(before) == _members(after):
        return UPDATE
    if key == "optimizer.weight_decay" and None in (before, after):  # it decides on the default groups of a class
        return rule("optimizer.groups")
    if key == "schedule.kind" and "custom" in (before, after):  # a class instead of one of the plan's schedules
        return SCHEDULE_STATE
    if key == "checkpoint.enabled" and not after:
        return never("a run resumes from checkpoints only")
    return rule(key)


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
    fields: dict[str, Any] = {}
    for name, group in config.groups().items():
        if dataclasses.is_dataclass(group):
            values = {key_of(field): getattr(group, field.name) for field in dataclasses.fields(group)}
            group = {**values.pop("*", {}), **values}
        fields[name] = group
    return fields


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
