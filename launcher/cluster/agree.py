"""What must be the same on every host of a job, and how it is told where it is not."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

from launcher.cluster.channel import Message
from launcher.plan import LaunchPlan, RunPlan

# a host's own: directories, addresses, environment; and what only follows from the rest
_OWN = (
    "run",
    "env",
    "notes",
    "cluster.cwd",
    "cluster.import_from",
    "cluster.interface",
    "cluster.rendezvous",
    "cluster.link_gbit",
    "cluster.place",
)
_DERIVED = (
    "batch.world_size", "epoch.windows", "epoch.short_window", "strategy.sync_reason", "strategy.payload_bytes",
    "strategy.payload_bytes_every", "strategy.wire_bytes", "strategy.wire_bytes_every", "strategy.forecasts",
    "strategy.memory_bytes", "strategy.rehearses", "fewer", "task.flops_per_sample",
)  # fmt: skip
# the plan's names, and the keys that a user sets
_KEYS = {
    "task.samples": "the task's data (samples)",
    "task.parameters": "the task's code (its model's parameters)",
    "task.unit_parameters": "the task's code (parameters in shard units)",
    "task.gradient_bytes": "the task's code (bytes of gradients)",
    "strategy.sync": "strategy.sync (or what auto made of it)",
    "cluster.min_nodes": "cluster.nodes (the fewest)",
    "cluster.kind": "cluster", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "schedule.kind": "schedule", "task.target": "task._target_",
    "epoch.short_window_policy": "batch.short_window", "train.calibrate_s": "run.calibrate_s",
    "optimizer.base_lr": "optimizer.lr", "optimizer.lr": "optimizer.lr, scaled",
    "optimizer.base_betas": "optimizer.betas", "optimizer.betas": "optimizer.betas, scaled",
    "optimizer.base_eps": "optimizer.eps", "optimizer.eps": "optimizer.eps, scaled",
}  # fmt: skip
_LINES = 12


def facts(plan: LaunchPlan, run_name: str | None) -> Message:
    """By the key that a user knows: everything of ``plan`` that decides what is computed, and the versions."""
    found: Message = {"run.name": run_name}
    if isinstance(plan, RunPlan):  # the rest of what is planned for fewer hosts follows
        found |= {f"strategy.sync on {world.nodes} hosts": world.strategy.sync.value for world in plan.fewer}
    for key, value in _flat("", json.loads(json.dumps(asdict(plan)))):
        if key not in _DERIVED and not any(key == own or key.startswith(f"{own}.") for own in _OWN):
            name = _KEYS.get(key, key)
            found[f"task.{name.removeprefix('task.params.')}" if name.startswith("task.params.") else name] = value
    for package in ("launcher", "torch"):
        found[f"version of {package}"] = metadata.version(package)
    found["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return found


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [
        pair
        for name, item in cast(Message, value).items()
        for pair in _flat(f"{prefix}.{name}" if prefix else name, item)
    ]


def differences(here: Message, there: Any, host: str, other: str) -> str:
    """What differs, with both values; an empty string where nothing does. ``there``: as it came from the other."""
    if not isinstance(there, dict):
        return f"{other} sent no description of its job. Nothing was started."
    theirs = cast(Message, there)
    missing = "nothing"
    lines = [
        f"  {key}: {_text(here.get(key, missing))} on {host}, {_text(theirs.get(key, missing))} on {other}"
        for key in sorted({*here, *theirs})
        if here.get(key, missing) != theirs.get(key, missing)
    ]
    if not lines:
        return ""
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"  and {len(lines) - _LINES} more"]
    first, last = (
        "The hosts were not given the same job. Nothing was started.",
        "  Type the same command on every host, where the same code and data are.",
    )
    return "\n".join([first, *lines, last])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
