"""JSON schema of configuration files, by which editors complete and check them."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any

from launcher.config.key_docs import Group, Key, groups
from launcher.config.key_facts import key_of
from launcher.config.schema import WITH_TARGET

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
    return {"description": f"{key.meaning}{default}", "anyOf": [*_forms(hint), {"type": "null"}, _INTERPOLATION]}


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
