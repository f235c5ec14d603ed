"""What makes two cells the same: what they compute, on what, with which code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from launcher.plan import RunPlan

# who and where, what is shown and kept: a run that differs in these only is not run again
_NOT_CONTENT = ("format", "run", "env", "command", "checkpoint", "wandb", "notes")
_CLUSTER = ("kind", "nodes", "workers_per_node", "device")
_QUEUEING = (
    "job-name", "time", "account", "qos", "dependency", "mem", "requeue", "comment", "mail-type", "mail-user",
    "nice", "begin",
)  # fmt: skip
# what is predicted, and may come out otherwise another time
_PREDICTED = ("sync_reason", "forecasts", "memory_bytes", "rehearses")


def content_of(plan: RunPlan, code: str) -> str:
    """A digest of what a plan computes. ``code``: one of the user's modules."""
    fields: dict[str, Any] = dataclasses.asdict(plan)
    cluster, strategy = fields["cluster"], fields["strategy"]
    known = {name: value for name, value in fields.items() if name not in _NOT_CONTENT}
    known["cluster"] = {name: cluster[name] for name in _CLUSTER}
    if cluster["slurm"] is not None:
        options: dict[str, Any] = cluster["slurm"]["options"]
        known["nodes"] = {name: value for name, value in options.items() if name not in _QUEUEING}
        known["container"] = cluster["slurm"]["container"]
    known["strategy"] = {name: value for name, value in strategy.items() if name not in _PREDICTED}
    return digest([known, plan.run.version, code])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
