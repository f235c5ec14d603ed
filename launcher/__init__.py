"""Distributed training where the effective global batch is a contract.

The public names; each is imported when it is first used, so that `import launcher` brings neither torch nor wandb.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import make_plan as make_plan
    from launcher.api import plan_job as plan_job
    from launcher.compose import compose as compose
    from launcher.config import Config as Config
    from launcher.plan import RunPlan as RunPlan
    from launcher.study import Job as Job
    from launcher.study import Study as Study
    from launcher.study import submit as submit
    from launcher.study import sweep as sweep
    from launcher.train.engine import Engine as Engine
    from launcher.train.step import StepResult as StepResult
    from launcher.train.task import Loss as Loss

_HOMES = {
    "Config": "launcher.config",
    "Engine": "launcher.train.engine",
    "Job": "launcher.study",
    "Loss": "launcher.train.task",
    "RunPlan": "launcher.plan",
    "StepResult": "launcher.train.step",
    "Study": "launcher.study",
    "compose": "launcher.compose",
    "make_plan": "launcher.api",
    "plan_job": "launcher.api",
    "submit": "launcher.study",
    "sweep": "launcher.study",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__version__: str  # that of pyproject.toml


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # takes 45 ms, half of what `import launcher` may take

        return metadata.version("launcher")
    if name not in _HOMES:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
