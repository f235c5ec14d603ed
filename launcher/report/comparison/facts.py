"""What was decided about a run before it began: from its plan.json and config.yaml."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launcher.config import PrecisionKind
from launcher.paths import RunPaths, read_json

# what names a run, or says where a copy of it goes, does not change what is measured
_NO_SETTINGS = ("run.", "wandb.", "sweep.", "hydra.")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was decided before the start. ``steps``: planned, None for a stream. ``settings``: config.yaml, flat, with
    what the plan solved in place of what was left open."""

    name: str
    version: str
    created: str
    target: str
    device: str
    strategy: str
    sync: str
    world_size: int
    global_size: int
    micro_size: int
    accumulation: int
    steps: int | None
    settings: dict[str, str]


def facts_of(plan: dict[str, Any], paths: RunPaths) -> Facts:
    """Raises OSError, KeyError and the like for what another version has written. ``plan``: plan.json's object."""
    batch, cluster, run = plan["batch"], plan["cluster"], plan["run"]
    solved = {f"cluster.{name}": cluster[name] for name in ("workers_per_node", "device")}
    if cluster.get("min_nodes") is None:  # a range is told as it was set
        solved["cluster.nodes"] = cluster["nodes"]
    solved["optimizer.lr"] = plan["optimizer"]["lr"]
    solved["precision.kind"] = plan["precision"]["kind"]
    if solved["precision.kind"] == PrecisionKind.auto and (decided := read_json(paths.precision)) is not None:
        solved["precision.kind"] = decided["kind"]
    return Facts(
        name=run["name"],
        version=run["version"],
        created=run["created"],
        target=plan["task"]["target"],
        device=cluster["device"],
        strategy=plan["strategy"]["kind"],
        sync=plan["strategy"]["sync"],
        world_size=batch["world_size"],
        global_size=batch["global_size"],
        micro_size=batch["micro_size"],
        accumulation=batch["accumulation"],
        steps=plan["train"]["steps"],
        settings=_settings(paths) | {name: _text(value) for name, value in solved.items()},
    )


def _settings(paths: RunPaths) -> dict[str, str]:
    import yaml

    # the C one is ten times as fast, and not in every build
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    config = yaml.load(paths.config.read_text(encoding="utf-8"), loader)
    return {key: value for key, value in _flat(config, "").items() if not key.startswith(_NO_SETTINGS)}


def _flat(value: Any, prefix: str) -> dict[str, str]:
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))  # pyright: ignore[reportUnknownArgumentType]
        return flat
    return {prefix: _text(value)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
