"""Trackers that are installed, those of a run, and what can be checked of them before a start.

The tracker of W&B is part of the core. Other packages name their classes by the entry point ``launcher.trackers``:
NAME = "package.module:Class", a subclass of ``launcher.trackers.tracker.Tracker``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache

from launcher.config.choices import WandbMode
from launcher.config.schema import Config
from launcher.errors import ConfigError, UserError, did_you_mean
from launcher.plan.run_plan import RunPlan
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths
from launcher.targets import entry_points, load_named
from launcher.trackers.tracker import Tracker

GROUP = "launcher.trackers"
_CORE = {"wandb": "launcher.trackers.wandb_tracker:WandbTracker"}


@cache
def installed_trackers() -> dict[str, str]:
    """Return "package.module:Class" of each installed tracker by name; W&B's cannot be replaced."""
    return {name: point.value for name, point in entry_points(GROUP).items()} | _CORE


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker.

    Raises:
        ConfigError: none of this name is installed.
        SiteError: it cannot be imported.
    """
    target = _CORE.get(name) or installed_trackers().get(name)
    if target is None:
        names = sorted(installed_trackers())
        likely = did_you_mean(name, names)
        raise ConfigError(
            "trackers", name, "no tracker of this name is installed.", f"{likely}Installed: {', '.join(names)}."
        )
    return load_named(target, f"trackers={name}")


def described_tracker(name: str) -> type[Tracker]:
    """Return the class of a tracker; one with a title only if it is not installed here, where a run is only shown."""
    try:
        return tracker_class(name)
    except UserError:
        return type("NotInstalled", (Tracker,), {"title": name})


def require_trackers(config: Config, env: Mapping[str, str]) -> None:
    """Check what can be known before the start: names, packages and settings.

    Raises:
        ConfigError, SiteError: something is missing or wrong.
    """
    for number, name in enumerate(config.trackers):
        if name in config.trackers[:number]:
            raise ConfigError("trackers", config.trackers, f"{name} is there twice.")
        kind = tracker_class(name)
        # an image has packages of its own
        if config.cluster.container is None and kind.module and importlib.util.find_spec(kind.module) is None:
            raise ConfigError(
                "trackers", config.trackers, f"{kind.module} is not installed.",
                f"Install it ({kind.install}), or leave {name} out.",
            )  # fmt: skip
        kind.check(config, env)


def mirrors_of(plan: RunPlan) -> tuple[str, ...]:
    """Return the trackers that mirror the run's record: all that are listed, but W&B if it is disabled."""
    return tuple(name for name in plan.trackers if name != "wandb" or plan.wandb.mode is not WandbMode.disabled)


def recorded_trackers(paths: RunPaths) -> tuple[str, ...]:
    """Return the trackers of a run's record, also if its plan cannot be read as one."""
    for file in (paths.plan, paths.loop_plan):
        fields = read_json(file) or {}
        if "batch" in fields:
            return tuple(fields.get("trackers", ()))
    return ()
