"""What makes two cells the same: what they compute, on what, with which code."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import socket
from typing import Any

from launcher.plan import RunPlan

# who and where, and what is shown: a run that differs in these only is not run again
_NOT_CONTENT = ("format", "run", "command", "wandb", "notes", "fewer")
_NOT_OF_CLUSTER = ("cwd", "import_from", "link_gbit", "grace_s", "max_restarts", "slurm", "min_nodes")
_QUEUEING = (
    "job-name", "time", "account", "qos", "dependency", "mem", "requeue", "comment", "mail-type", "mail-user",
    "nice", "begin",
)  # fmt: skip
_NOT_OF_TRAIN = ("hang_timeout", "straggler_share")
# what is predicted, and may come out otherwise another time
_PREDICTED = ("sync_reason", "forecasts", "memory_bytes", "rehearses")


def content_of(plan: RunPlan, code: str) -> str:
    """A digest of what a plan computes, and of where its speed is measured. ``code``: one of the user's files."""
    fields: dict[str, Any] = dataclasses.asdict(plan)
    cluster, strategy = fields["cluster"], fields["strategy"]
    known = {name: value for name, value in fields.items() if name not in _NOT_CONTENT}
    known["train"] = {name: value for name, value in fields["train"].items() if name not in _NOT_OF_TRAIN}
    known["cluster"] = {name: value for name, value in cluster.items() if name not in _NOT_OF_CLUSTER}
    if (slurm := cluster["slurm"]) is None:
        known["machine"] = socket.gethostname()  # a home may be shared by unlike ones
    else:
        options: dict[str, Any] = slurm["options"]
        known["options"] = {name: value for name, value in options.items() if name not in _QUEUEING}
        known["slurm"] = [slurm["container"], slurm["setup"]]
    known["precision"] = {name: value for name, value in fields["precision"].items() if name != "reason"}
    known["task"] = {name: value for name, value in fields["task"].items() if name != "flops_per_sample"}
    known["strategy"] = {name: value for name, value in strategy.items() if name not in _PREDICTED}
    return digest([known, plan.run.version, importlib.metadata.version("torch"), code])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
