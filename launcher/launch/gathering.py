"""Gathering: node 0 waits for the other hosts and compares their jobs with its own."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any, cast

from launcher.errors import SiteError, UserError
from launcher.launch.network import Channel, Door, Message, Route, wait
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.plan.worlds import NodeRange

# not compared: values of one host (directories, addresses, environment), and values derived from compared ones
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
    "epoch.short_window_policy": "batch.short_window", "train.calibrate_s": "run.calibrate_s",
    "optimizer.base_lr": "optimizer.lr", "optimizer.lr": "optimizer.lr, scaled",
    "optimizer.base_betas": "optimizer.betas", "optimizer.betas": "optimizer.betas, scaled",
    "optimizer.base_eps": "optimizer.eps", "optimizer.eps": "optimizer.eps, scaled",
}  # fmt: skip
_LINES = 12


def facts(plan: LaunchPlan, run_name: str | None) -> Message:
    """Return, by config key, every value of ``plan`` that decides what is computed, and the versions."""
    found: Message = {"run.name": run_name}
    if isinstance(plan, RunPlan):  # everything else in the plans for fewer hosts is derived
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
    """Return a message with all values that differ; empty if none does. ``there``: facts as received from ``other``."""
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


# seconds that node 0 waits for one more host once enough are there
SETTLE_S = 30

Say = Callable[[str], None]


def wait_for_hosts(
    door: Door, guests: list[Channel], allowed: NodeRange, known: Message, route: Route, say: Say, within_s: float
) -> None:
    """Wait for the other hosts and append them to ``guests`` in the order of arrival.

    Args:
        door: listening socket.
        guests: connections to the hosts that have arrived.
        allowed: range of the number of hosts, this one included.
        known: facts of this host, which the others must match.
        route: where the hosts meet.
        say: shows one line to the user.
        within_s: seconds within which the smallest allowed number of hosts must arrive.

    Raises:
        UserError: A host was not given the same job.
        SiteError: Too few hosts came.
    """
    say(f"This is node 0 of {allowed.words}, waiting at {route.shown} for the others.")
    begun = last_change = time.monotonic()
    said_for = 0
    while (here := len(guests) + 1) < allowed.most:
        enough = here >= allowed.least
        if enough and said_for != here:
            said_for = here
            say(f"{here} {'host is' if here == 1 else 'hosts are'} enough: waiting {SETTLE_S} s for one more.")
        if enough and time.monotonic() - last_change >= SETTLE_S:
            return
        if not enough and time.monotonic() - begun > within_s:
            raise SiteError(
                f"cluster.nodes={_typed(allowed)}: {here} of {allowed.words} hosts came to {route.shown} within "
                f"{within_s // 60:.0f} minutes.\n  Type the same command on each of them."
            )
        wait([*door.sources(), *guests], 1.0)
        if _changed(door, guests, allowed, known, route, say):
            last_change, said_for = time.monotonic(), 0


def _changed(door: Door, guests: list[Channel], allowed: NodeRange, known: Message, route: Route, say: Say) -> bool:
    """Add hosts that arrived and remove hosts that left. Return True if any did."""
    before = list(guests)
    for channel, hello in door.arrivals():
        if len(guests) == allowed.most - 1:
            channel.send(refused=f"cluster.rendezvous={route.shown}: all {allowed.most} hosts are here already.")
            channel.close()
            continue
        guests.append(channel)
        differing = differences(known, hello.get("facts"), route.rendezvous[0], channel.peer)
        if differing:
            raise UserError(differing)
        say(f"{channel.peer} is here: {len(guests) + 1} of {allowed.words} hosts.")
    for guest in [guest for guest in guests if guest.receive() or not guest.open]:
        guest.close()
        guests.remove(guest)
        say(f"{guest.peer} has left again.")
    return guests != before


def _typed(allowed: NodeRange) -> str:
    return str(allowed.most) if allowed.fixed else f"{allowed.least}:{allowed.most}"
