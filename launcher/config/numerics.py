"""Values that installed packages add to a config key by the entry point ``launcher.numerics``.

An entry point ``KEY.VALUE = "package.module:name"`` adds ``KEY=VALUE``: ``precision.NAME`` a ``FloatFormat``
(launcher/plan/float_format.py), ``strategy.compress.NAME`` a function that makes a ``Compression``
(launcher/train/parallel/ddp.py), ``batch.norm.NAME`` a function that makes a ``Normaliser`` which looks ahead over each
window (launcher/train/parallel/batchnorm.py).
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from typing import Any

from launcher.errors import SiteError

GROUP = "launcher.numerics"


@cache
def _installed() -> dict[str, str]:
    """Return "package.module:name" of each added value, by "KEY.VALUE"."""
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def add_values(members: dict[str, Any], key: str) -> None:
    """Add the values of installed packages to ``members``, the body of the enumeration of ``key``; none replaces a
    value of the core."""
    for name in sorted(_installed()):
        place, _, value = name.rpartition(".")
        if place == key and value not in members:
            members[value] = value


def is_added(key: str, value: str) -> bool:
    """Return whether ``KEY=VALUE`` is a value of an installed package."""
    return f"{key}.{value}" in _installed()


@cache
def added_value(key: str, value: str) -> Any:
    """Return what the entry point of ``KEY=VALUE`` names; None for a value of the core.

    Raises:
        SiteError: it cannot be imported.
    """
    if not is_added(key, value):
        return None
    target = _installed()[f"{key}.{value}"]
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SiteError(f"{key}={value}: {target} cannot be imported: {error}.") from error
