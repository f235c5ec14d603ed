"""Configuration keys: type, default and meaning of each, from the schema, conf/ and the classes that a config names.

This module does not import torch; a class of the config may.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from launcher.config.added_groups import CONF, chosen_by_default, option_files
from launcher.config.key_facts import default_of, key_of, typed
from launcher.config.schema import WITH_TARGET, Config, group_kinds
from launcher.targets import find_target, hints_of


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: GROUP.KEY, or GROUP for the key that chooses an option of the group.
        type: type in words, or the allowed values.
        values: the allowed values, if there is a list of them.
        default: as typed; None if the plan decides it, or if it depends on the option of the group.
        defaults: the default under each option of the group, if it depends on that.
        meaning: its meaning, with its unit.
        options: the options of the group, for the key that chooses one.
    """

    name: str
    type: str
    values: tuple[str, ...] = ()
    default: str | None = None
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    meaning: str = ""
    options: tuple[str, ...] = ()

    @property
    def default_text(self) -> str:
        """Return the default, with the options that it depends on; empty if there is none."""
        return self.default or ", ".join(f"{value} ({option})" for option, value in self.defaults.items())


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of keys. One that is a single key, such as `trackers`, has only this.

    Attributes:
        meaning: that of the group as a whole.
        options: values of each option, from conf/.
        hint: type of the group's value: a dataclass, if it has several keys.
    """

    name: str
    meaning: str
    options: Mapping[str, Mapping[str, Any]]
    hint: Any
    keys: tuple[Key, ...]


@functools.cache
def groups() -> tuple[Group, ...]:
    """Return all groups of the schema, with their keys."""
    meanings = _docstrings(Config)
    return tuple(_group(name, hint, meanings.get(name, "")) for name, hint in group_kinds().items())


def _group(name: str, hint: Any, meaning: str) -> Group:
    options = _options(name)
    if not dataclasses.is_dataclass(hint):
        key = Key(name=name, type=type_text(hint), meaning=meaning, options=tuple(options))
        return Group(name=name, meaning=meaning, options=options, hint=hint, keys=(key,))
    schema = typing.cast("type[Any]", hint)
    keys = tuple(_keys(name, schema, options))
    return Group(name=name, meaning=_line(inspect.getdoc(schema) or ""), options=options, hint=schema, keys=keys)


def _keys(group: str, schema: type[Any], options: Mapping[str, Mapping[str, Any]]) -> typing.Iterator[Key]:
    """Yield the keys of a group; the choice of an option comes first."""
    hints, meanings = typing.get_type_hints(schema), _docstrings(schema)
    for field in sorted(dataclasses.fields(schema), key=lambda field: field.name != "kind"):
        name, hint, meaning = key_of(field), hints[field.name], meanings[field.name]
        of_hint: dict[str, Any] = {"type": type_text(hint), "values": values_of(hint), "meaning": meaning}
        if field.name == "kind":
            if hint is str:  # packages add kinds
                of_hint |= {"type": ", ".join(options), "values": tuple(options)}
            yield Key(name=group, default=_selected()[group], options=tuple(options), **of_hint)
        elif name == "*":
            yield Key(name=f"{group}.ARGUMENT", **of_hint)
        else:
            given = {option: typed(values[name]) for option, values in options.items() if name in values}
            yield Key(name=f"{group}.{name}", **_defaults(default_of(field), given, len(options)), **of_hint)


def _defaults(default: Any, given: dict[str, str], options: int) -> dict[str, Any]:
    """Return the fields of a key's default.

    Args:
        default: that of the schema.
        given: by the option of the group that sets the key.
        options: how many options the group has.
    """
    own = None if default is None else typed(default)
    if set(given.values()) <= {own or "null"}:
        return {"default": own}
    if len(set(given.values())) == 1 and len(given) == options:
        return {"default": next(iter(given.values()))}
    return {"defaults": given}


def class_keys(group: str, target: str, positional: int = 0) -> list[Key]:
    """Return the arguments of the class ``GROUP._target_`` as keys, with what its docstring says of them. The type of
    one without an annotation is that of its default.

    Args:
        positional: number of arguments that the launcher passes before these.

    Raises:
        ConfigError: there is no such class.
    """
    function = find_target(f"{group}._target_", target)
    meanings = _argument_docs(inspect.getdoc(function) or "")
    try:
        parameters = [*inspect.signature(function).parameters.values()][positional:]
    except ValueError:  # built in C
        return [Key(name=f"{group}.{name}", type="", meaning=meaning) for name, meaning in meanings.items()]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    hints: dict[str, Any] = {
        each.name: type(each.default) for each in parameters if isinstance(each.default, bool | int | float | str)
    } | hints_of(function)
    return [
        Key(
            name=f"{group}.{each.name}",
            type=type_text(hints[each.name]) if each.name in hints else "",
            values=values_of(hints.get(each.name)),
            default=None if each.default in (each.empty, None) else typed(each.default),
            meaning=meanings.get(each.name, ""),
        )
        for each in parameters
        if each.kind not in variable
    ]


def _argument_docs(docstring: str) -> dict[str, str]:
    """Return what a docstring in Google's style says of each argument."""
    _, _, section = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    name, indent = "", len(section) - len(section.lstrip(" "))
    for line in section.splitlines():
        inside = line[indent:]
        if line.strip() and not line.startswith(" " * indent):
            break  # the next section
        if begin := re.match(r"(\w+(?:, \w+)*)(?: \(.*?\))?: *(.*)", inside):
            name = begin[1]
            found |= dict.fromkeys(name.split(", "), begin[2])
        else:
            found |= {each: f"{found[each]} {inside.strip()}" for each in name.split(", ") if each}
    return {name: _line(text) for name, text in found.items()}


def values_of(hint: Any) -> tuple[str, ...]:
    """Return the values of a type that has a list of them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return tuple(value for argument in arguments for value in values_of(argument))
    if origin is typing.Literal:
        return tuple(map(str, arguments))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return tuple(member.value for member in hint)
    return ("true", "false") if hint is bool else ()


def type_text(hint: Any) -> str:
    """Return a type in words; a list of values as these."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(argument) for argument in arguments if argument is not type(None))
    if values := values_of(hint):
        return ", ".join(values)
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if hint is dict or origin is dict:
        return "mapping"
    name = getattr(hint, "__name__", str(hint))
    return {"str": "text", "int": "integer", "float": "number"}.get(name, name)


def _docstrings(schema: type[Any]) -> dict[str, str]:
    """Return the string literal under each field of a dataclass."""
    body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]).body
    found: dict[str, str] = {}
    for field, after in itertools.pairwise([*body, None]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            found[field.target.id] = _line(str(text.value)) if isinstance(text, ast.Constant) else ""
    return found


def _options(group: str) -> dict[str, dict[str, Any]]:
    """Return the values of each option of a group, from conf/."""
    import yaml

    files = option_files(group).items()
    return {name: yaml.safe_load(file.read_text(encoding="utf-8")) or {} for name, file in files}


@functools.cache
def _selected() -> dict[str, str]:
    """Return the option that is selected by default in each group."""
    import yaml

    entries: list[str | dict[str, str]] = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    own = {group: option for entry in entries if not isinstance(entry, str) for group, option in entry.items()}
    return own | chosen_by_default()


def _line(text: str) -> str:
    """Return a docstring as one line."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


DIALECT = "http://json-schema.org/draft-07/schema#"
# Hydra resolves it later: ${train.steps}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema_of(group: Group | None) -> dict[str, Any]:
    """Return the schema of files with ``# @package _global_``; with ``group``, of a file that is an option of it."""
    head = {"$schema": DIALECT, "title": "launcher" if group is None else f"launcher: an option of {group.name}"}
    choices = [{"type": "object"}, {"type": "string"}]
    defaults = {"type": "array", "items": {"anyOf": choices}, "description": "Options of groups, for Hydra."}
    if group is not None:
        schema = _of_group(group)
        return head | schema | {"properties": schema.get("properties", {}) | {"defaults": defaults}}
    sections = {each.name: _of_group(each) for each in groups()}
    hydra = {"type": "object", "description": "Settings of Hydra itself."}
    properties = sections | {"defaults": defaults, "hydra": hydra}
    return head | {"type": "object", "properties": properties, "additionalProperties": False}


def _of_group(group: Group) -> dict[str, Any]:
    if not dataclasses.is_dataclass(group.hint):
        return _of_key(group.keys[0], group.hint)
    hints = typing.get_type_hints(group.hint)
    of_key = {key.name: key for key in group.keys}
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(group.hint):
        name = key_of(field)
        if name != "*":
            key = of_key[group.name if field.name == "kind" else f"{group.name}.{name}"]
            properties[name] = _of_key(key, hints[field.name])
    free = group.name in WITH_TARGET
    return {
        "type": "object", "description": group.meaning, "properties": properties, "additionalProperties": free,
    }  # fmt: skip


def _of_key(key: Key, hint: Any) -> dict[str, Any]:
    default = f" Default: {key.default_text}." if key.default_text else ""
    forms = [{"enum": [*key.values]}] if hint is str and key.values else _forms(hint)
    return {"description": f"{key.meaning}{default}", "anyOf": [*forms, {"type": "null"}, _INTERPOLATION]}


def _forms(hint: Any) -> list[dict[str, Any]]:
    """Return the schema of each form that a value may have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return [form for argument in arguments if argument is not type(None) for form in _forms(argument)]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return [{"enum": [member.value for member in hint]}]
    if origin is list:
        return [{"type": "array", "items": {"anyOf": [*_forms(arguments[0]), _INTERPOLATION]}}]
    if origin is dict or hint is dict:
        return [{"type": "object"}]
    return [{"type": _TYPES[hint]}] if hint in _TYPES else [{}]
