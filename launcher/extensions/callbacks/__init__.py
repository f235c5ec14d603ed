"""Callbacks that come with the launcher, named in ``callbacks=[{_target_: NAME}]``.

Each class is imported when it is first used. launcher/train/callback_set.py calls the methods of callbacks, whose names
are in launcher/plan/callback_plan.py.
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "Ema": "launcher.extensions.callbacks.ema",
    "MemorySnapshot": "launcher.extensions.callbacks.diagnostics",
    "Profile": "launcher.extensions.callbacks.diagnostics",
    "GeneratedSamples": "launcher.extensions.callbacks.samples",
    "Webhook": "launcher.extensions.callbacks.notifications",
}
__all__ = list(HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'launcher.extensions.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
