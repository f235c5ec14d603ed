"""Facts of a job that must be the same on all hosts, on each of which the command is typed."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

from launcher.launch.channel import Message
from launcher.plan.forecast import PREDICTIONS
from launcher.plan.host import without_secrets
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_lines

# not compared: values of one host (directories, addresses, environment), and values derived from compared ones
_OWN = (
    "run",
    "env",
    "notes",
    "cluster.cwd",
    "cluster.import_from",
    "cluster.interface",
    "cluster.rendezvous",
    "cluster.price_per_gpu_hour",
    "cluster.place",
)
_DERIVED = (
    "batch.world_size", "epoch.windows", "epoch.short_window", "fewer", "task.flops_per_sample",
    *(f"strategy.{name}" for name in PREDICTIONS),
)  # fmt: skip
# config key that the user sets, by name in the plan
_KEYS = {
    "task.samples": "the task's data (samples)",
    "task.parameters": "the task's code (its model's parameters)",
    "task.unit_parameters": "the task's code (parameters in shard units)",
    "task.gradient_bytes": "the task's code (bytes of gradients)",
    "strategy.sync": "strategy.sync (or what auto made of it)",
    "cluster.min_nodes": "cluster.nodes (the fewest)",
    "cluster.kind": "cluster", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "schedule.kind": "schedule", "task.target": "task._target_",
    "optimizer.target": "optimizer._target_", "schedule.target": "schedule._target_",
    "epoch.short_window_policy": "batch.short_window", "train.calibrate_s": "run.calibrate_s",
    "optimizer.base_lr": "optimizer.lr", "optimizer.lr": "optimizer.lr, scaled",
    "optimizer.base_betas": "optimizer.betas", "optimizer.betas": "optimizer.betas, scaled",
    "optimizer.base_eps": "optimizer.eps", "optimizer.eps": "optimizer.eps, scaled",
}  # fmt: skip
# arguments of a class, which are keys of its group
_ARGUMENTS = re.compile(r"^(task|optimizer|schedule)\.(?:params|arguments)\.")
_LINES = 12


def job_facts(plan: LaunchPlan, run_name: str | None) -> Message:
    """Return, by config key, every value of ``plan`` that decides what is computed, and the versions."""
    facts: Message = {"run.name": run_name}
    if isinstance(plan, RunPlan):  # everything else in the plans for fewer hosts is derived
        facts |= {f"strategy.sync on {world.nodes} hosts": world.strategy.sync.value for world in plan.fewer}
    for key, value in _flat("", json.loads(json.dumps(asdict(plan)))):
        if key not in _DERIVED and not any(key == own or key.startswith(f"{own}.") for own in _OWN):
            name = _KEYS.get(key, key)
            facts[_ARGUMENTS.sub(r"\1.", name)] = value
    for package in ("launcher", "torch"):
        facts[f"version of {package}"] = metadata.version(package)
    facts["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return facts


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [
        pair
        for name, item in cast(Message, value).items()
        for pair in _flat(f"{prefix}.{name}" if prefix else name, item)
    ]


def differences(here: Message, there: Any, host: str, other: str) -> str:
    """Return a message with all values that differ; empty if none does. ``there``: facts as received from ``other``."""
    if not isinstance(there, dict):
        return f"{other} sent no description of its job. Nothing was started."
    theirs = cast(Message, there)
    missing = "nothing"
    lines = [
        f"{key}: {_shown(key, here.get(key, missing))} on {host}, {_shown(key, theirs.get(key, missing))} on {other}"
        for key in sorted({*here, *theirs})
        if here.get(key, missing) != theirs.get(key, missing)
    ]
    if not lines:
        return ""
    head = "The hosts were not given the same job. Nothing was started."
    remedy = "Type the same command on every host, where the same code and data are."
    return "\n  ".join([head, *first_lines(lines, _LINES), remedy])


def _shown(key: str, value: Any) -> str:
    value = without_secrets(value, key)
    return value if isinstance(value, str) else json.dumps(value)
