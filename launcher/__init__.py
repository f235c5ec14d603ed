"""Distributed training where the effective global batch is a contract.

Public names are imported on first use, so that `import launcher` imports neither torch nor wandb.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import Job as Job
    from launcher.api import Study as Study
    from launcher.api import make_plan as make_plan
    from launcher.api import submit as submit
    from launcher.api import sweep as sweep
    from launcher.config.hydra import compose as compose
    from launcher.config.schema import Config as Config
    from launcher.launch.planner import plan_job as plan_job
    from launcher.loss import Loss as Loss
    from launcher.plan.run_plan import RunPlan as RunPlan
    from launcher.task import ReadyBatches as ReadyBatches
    from launcher.train.context import Context as Context
    from launcher.train.context import current as current
    from launcher.train.data.packing import Packing as Packing
    from launcher.train.data.packing import document_bounds as document_bounds
    from launcher.train.data.packing import document_mask as document_mask
    from launcher.train.data.packing import document_mask_mod as document_mask_mod
    from launcher.train.data.sample_order import ArrangedData as ArrangedData
    from launcher.train.engine.window_totals import StepResult as StepResult
    from launcher.train.opened_run import OpenedRun as OpenedRun
    from launcher.train.opened_run import open_run as open_run
    from launcher.train.run_engine import RunEngine

    Engine = RunEngine


_HOMES = {
    "ArrangedData": "launcher.train.data.sample_order",
    "Config": "launcher.config.schema",
    "Context": "launcher.train.context",
    "Engine": "launcher.train.run_engine",
    "Job": "launcher.api",
    "Loss": "launcher.loss",
    "OpenedRun": "launcher.train.opened_run",
    "Packing": "launcher.train.data.packing",
    "ReadyBatches": "launcher.task",
    "RunPlan": "launcher.plan.run_plan",
    "StepResult": "launcher.train.engine.window_totals",
    "Study": "launcher.api",
    "compose": "launcher.config.hydra",
    "current": "launcher.train.context",
    "document_bounds": "launcher.train.data.packing",
    "document_mask": "launcher.train.data.packing",
    "document_mask_mod": "launcher.train.data.packing",
    "make_plan": "launcher.api",
    "open_run": "launcher.train.opened_run",
    "plan_job": "launcher.launch.planner",
    "submit": "launcher.api",
    "sweep": "launcher.api",
}
_OWN_NAMES = {"Engine": "RunEngine"}  # in its module, whose base class is the engine of `launch train`
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
DISTRIBUTION = "samebatch"  # name on the package index, where "launcher" is another project
__version__: str  # as in pyproject.toml


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # takes 45 ms, half of what `import launcher` may take

        return metadata.version(DISTRIBUTION)
    if name not in _HOMES:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), _OWN_NAMES.get(name, name))
