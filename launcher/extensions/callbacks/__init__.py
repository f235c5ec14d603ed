"""Callbacks that come with the launcher, named in ``callbacks=[{_target_: launcher.callbacks.NAME}]``.

Each class is imported when it is first used. launcher/train/callback_set.py calls the methods of callbacks, whose names
are in launcher/plan/callback_plan.py.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Ema": "launcher.callbacks.ema",
    "MemorySnapshot": "launcher.callbacks.diagnostics",
    "Profile": "launcher.callbacks.diagnostics",
    "GeneratedSamples": "launcher.callbacks.samples",
    "Webhook": "launcher.callbacks.notifications",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'launcher.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
