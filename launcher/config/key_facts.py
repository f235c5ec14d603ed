"""Facts of one config key, declared beside it: default, bounds, where it has an effect, what it affects, resuming."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, cast

NEW_RUN = "start a new run: launch train"
# what a change of a key changes: what is learned, the time of a step, a rank's memory, what is recorded of the run
AFFECTED = ("learning", "time", "memory", "record")
STEP = "learning time memory"


class Permission(Enum):
    """Permission to change a key when a run resumes.

    Attributes:
        change: always allowed.
        force: only with --force, because training differs from there on.
        never: the run could not resume.
    """

    change = auto()
    force = auto()
    never = auto()


class Resume(NamedTuple):
    """Rule for a change of a key when a run resumes. ``why``: consequence of the change."""

    permission: Permission
    why: str


def forced(why: str) -> Resume:
    return Resume(Permission.force, why)


def never(why: str) -> Resume:
    return Resume(Permission.never, why)


FREE = Resume(Permission.change, "")
UPDATE = forced("it is part of the update rule")


class Bound(NamedTuple):
    """Condition on a value other than None, and the message if it does not hold."""

    holds: Callable[[Any], object]
    problem: str


def _of_number(holds: Callable[[float], bool], problem: str) -> Bound:
    return Bound(holds, problem)


def at_least(low: float) -> Bound:
    return _of_number(lambda value: math.isfinite(value) and value >= low, f"must be at least {low}.")


def above(low: float) -> Bound:
    return _of_number(lambda value: math.isfinite(value) and value > low, f"must be above {low}.")


def between(low: float, high: float) -> Bound:
    return _of_number(lambda value: low <= value <= high, f"must be between {low} and {high}.")


# value of a cadence in optimizer steps that means: at the end of each epoch
EPOCH = "epoch"


def steps_or_epoch(low: int) -> Bound:
    """Return the bound of a number of optimizer steps of at least ``low``, or EPOCH."""

    def holds(value: int | str) -> bool:
        return value >= low if isinstance(value, int) else value == EPOCH

    return Bound(holds, f"must be a number of optimizer steps, at least {low}, or {EPOCH}.")


def tokens_in(value: int | str) -> int | None:
    """Return the number of tokens that ``value`` stands for, such as 4194304, 64K (1,024 each) or 4M (1,048,576 each);
    None if it stands for none."""
    found = re.fullmatch(r"([1-9]\d*)([KM]?)", str(value), re.IGNORECASE)
    return None if found is None else int(found[1]) * {"": 1, "K": 1024, "M": 1024**2}[found[2].upper()]


TOKENS = Bound(tokens_in, "must be a number of tokens, such as 65536, 64K (K: 1,024) or 4M (M: 1,048,576).")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def valid_betas(value: Any) -> bool:
    """Return whether ``value`` is two numbers of at least 0 and below 1."""
    numbers = cast("list[Any]", value) if isinstance(value, list) else []
    return len(numbers) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in numbers)


BETAS = Bound(valid_betas, "must be two numbers of at least 0 and below 1.")
NAME = Bound(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=,+-]{0,127}").fullmatch,
    "must be letters, digits and _ . = , + - only, starting with a letter or digit.",
)


def _has_no_scheme(path: str) -> bool:
    return "://" not in path


# bound of keys whose value is a directory or a file
PATH = Bound(
    _has_no_scheme,
    "is an address, and must be a path of the file system.\n  Write the path alone (/data for file:///data), or the "
    "directory in which a bucket is mounted.",
)


@dataclass(frozen=True)
class Facts:
    """Facts of a key.

    Attributes:
        bound: bound of its values; None: every value of its type.
        only: conditions under which it has an effect, with blanks between them: ``strategy=ddp|fsdp`` or
            ``strategy.compress=bf16`` (one of these values), ``cluster.container`` (a value, or a custom class).
        hint: remedy where a condition does not hold, in addition to the general one.
        resume: rule for a change when a run resumes.
        affects: words of ``AFFECTED``.
        name: name of the key within its group if it is not the field's; "*": all keys that have no field.
        nullable: null stands for the default.
        form: form of a list whose elements are no single values.
        was: former name of the key, dotted; an error names the new one.
    """

    bound: Bound | None
    only: str
    hint: str
    resume: Resume
    affects: frozenset[str]
    name: str
    nullable: bool
    form: str
    was: str


def key(
    default: Any,
    bound: Bound | None = None,
    *,
    affects: str,
    resume: Resume | None = None,
    only: str = "",
    hint: str = "",
    name: str = "",
    nullable: bool = True,
    form: str = "",
    was: str = "",
) -> Any:
    """Return the field of a config key; see ``Facts``. ``resume`` has a default only if learning is not affected."""
    words = affects.split()
    assert {*words} <= {*AFFECTED}, f"affects={affects!r}: allowed words are {', '.join(AFFECTED)}"
    if resume is None:
        assert "learning" not in words, "whether a resume may change what is learned must be said"
        resume = FREE
    facts = Facts(bound, only, hint, resume, frozenset(words), name, nullable, form, was)
    metadata = {"facts": facts}
    if isinstance(default, list | dict):
        mutable = cast("Any", default)
        return field(default_factory=lambda: copy.copy(mutable), hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def facts_of(field: Field[Any]) -> Facts:
    return field.metadata["facts"]


def key_of(field: Field[Any]) -> str:
    """Return the key of a field within its group; "*" for the field that has all other keys."""
    return facts_of(field).name or field.name


def default_of(field: Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


# words that Hydra would not parse as text
_NO_TEXT = ("null", "true", "false", "nan", "inf")


def typed(value: object) -> str:
    """Return ``value`` as typed on the command line, in the grammar of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(typed, cast('Sequence[object]', value)))}]"
    if isinstance(value, dict):
        pairs = cast("Mapping[str, object]", value).items()
        return f"{{{','.join(f'{key}:{typed(each)}' for key, each in pairs)}}}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_][\w.+/:@%-]*", text) and text.lower() not in _NO_TEXT:
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
