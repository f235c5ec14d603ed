"""Facts of a job that must be the same on all hosts, on each of which the command is typed."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

from launcher.launch.channel import Message
from launcher.plan.host import without_secrets
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan, part
from launcher.quantities import first_lines

# not compared: values of one host, and what affects records outside the run only
_OWN = (
    "run.name", "run.dir", "wandb.", "tensorboard.", "mlflow.", "cluster.interface", "cluster.rendezvous",
    "cluster.price_per_gpu_hour",
)  # fmt: skip
_NOT_OF_TASK = ("target", "params", "flops_per_sample")  # keys of the config, and what is derived
_LINES = 12


def job_facts(plan: LaunchPlan, run_name: str | None) -> Message:
    """Return, by config key, every value of ``plan`` that decides what is computed, and the versions."""
    facts: Message = {key: value for key, value in part(plan).items() if not key.startswith(_OWN)}
    facts |= {"run.name": run_name, "cluster.nodes (the fewest)": plan.cluster.min_nodes, "command": [*plan.command]}
    if isinstance(plan, RunPlan):  # everything else in the plans for fewer hosts is derived
        facts |= {f"strategy.sync on {world.nodes} hosts": world.strategy.sync.value for world in plan.fewer}
        facts["weights in checkpoint.init_from"] = plan.initial and plan.initial.digest
        described = {name: value for name, value in asdict(plan.task).items() if name not in _NOT_OF_TASK}
        facts |= {f"the task's {name}": value for name, value in json.loads(json.dumps(described)).items()}
    for package in ("launcher", "torch"):
        facts[f"version of {package}"] = metadata.version(package)
    facts["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    return facts


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
