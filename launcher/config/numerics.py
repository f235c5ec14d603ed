"""Values that installed packages add to a config key by the entry point ``launcher.numerics``.

An entry point ``KEY.VALUE = "package.module:name"`` adds ``KEY=VALUE``: ``precision.NAME`` a class, a
``FloatFormat`` (launcher/plan/float_format.py), ``strategy.compress.NAME`` a function that makes a ``Compression``
(launcher/train/parallel/ddp.py), ``batch.norm.NAME`` a function that makes a ``Normaliser`` which looks ahead over each
window (launcher/train/parallel/batchnorm.py).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from launcher.targets import entry_points, load_entry_point

GROUP = "launcher.numerics"
_ADDED: set[str] = set()  # "KEY.VALUE"


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry point of each added value, by "KEY.VALUE"."""
    return {point.name: point for point in entry_points(GROUP)}


def add_values(members: dict[str, Any], key: str) -> None:
    """Add the values of installed packages to ``members``, the body of the enumeration of ``key``; none replaces a
    value of the core."""
    for name in _installed():
        place, _, value = name.rpartition(".")
        if place == key and value not in members:
            members[value] = value
            _ADDED.add(name)


def is_added(key: str, value: str) -> bool:
    """Return whether ``KEY=VALUE`` is a value of an installed package."""
    return f"{key}.{value}" in _ADDED


@cache
def added_value(key: str, value: str) -> Any:
    """Return what the entry point of ``KEY=VALUE`` names; None for a value of the core.

    Raises:
        SiteError: it cannot be imported.
    """
    return load_entry_point(_installed()[f"{key}.{value}"], f"{key}={value}") if is_added(key, value) else None
