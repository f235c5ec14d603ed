"""Typed values out of plain JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any


def build(kind: Any, value: Any) -> Any:
    """``value`` out of JSON as ``kind``: a dataclass, an Enum, a tuple, a union with None, or a plain value. A field
    with a default may be missing: an earlier version did not know it."""
    if dataclasses.is_dataclass(kind):
        hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
        given = [f for f in dataclasses.fields(kind) if f.name in value or f.default is missing]
        return kind(**{f.name: build(hints[f.name], value[f.name]) for f in given})  # pyright: ignore
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else build(next(a for a in args if a is not types.NoneType), value)
    if origin is tuple:
        return tuple(build(args[0], item) for item in value)
    return value
