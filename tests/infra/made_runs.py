"""Runs that were never run: directories as `launch train` leaves them, with records that are easy to reckon with."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.config.hydra import compose
from launcher.config.schema import Config
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.rundir.files import write_json
from launcher.rundir.paths import RunPaths
from launcher.sweeps.manifest import Cell, Sweep


def make_run(
    root: Path, name: str, *overrides: str, steps: int = 30, target: str = "a.Task", version: str = "0.1.0",
    verdict: str | None = "done", step_s: float = 0.2, loss: float = 3.0, **metrics: Any,
) -> RunPaths:  # fmt: skip
    """``step_s``: of own windows; ``loss``: of the last record; ``metrics``: put into every record."""
    paths = RunPaths(root / name)
    paths.root.mkdir(parents=True)
    config = _config(*overrides, f"train.steps={steps}")
    run = RunInfo(name=name, id="x", dir=str(paths.root), created="2026-01-01T00:00:00+00:00", version=version)
    task = TaskPlan(target=target, params={}, samples=10**6, parameters=1, gradient_bytes=4000, unit_parameters=1)
    plan = solve(config, Site(gpus=0, cores=2, cwd=str(root)), task, run)
    plan.save()
    values = dataclasses.asdict(config)
    paths.config.write_text(json.dumps({**values.pop("added"), **values}))  # which is YAML too
    write_records(paths, records(plan, steps, step_s, loss, metrics))
    if verdict is not None:
        write_json(paths.summary, {"verdict": verdict, "failure": {"rank": 1, "error": "out of luck"}})
    return paths


@functools.cache
def _defaults() -> Config:
    return compose([])


def _config(*overrides: str) -> Config:
    """Return the config that Hydra would compose, but fast enough for many runs."""
    config = _defaults()
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, group), **{name: int(value)})
        config = dataclasses.replace(config, **{group: changed})
    return config


def records(plan: RunPlan, steps: int, step_s: float, loss: float, more: dict[str, Any]) -> list[dict[str, Any]]:
    """The 5th window is short; wall time has half a second of other things in each step; a step with sync=every would
    take a third longer."""
    sent = 0 if plan.batch.world_size == 1 else 7000
    made: list[dict[str, Any]] = []
    total = 0.0
    for step in range(1, steps + 1):
        took = step_s * (1 + 0.001 * (step % 7))
        total += took + 0.5
        made.append(
            {
                "step": step, "train/loss": loss + 2 * (1 - step / steps), "time/step_s": took,
                "time/data_s": 0.01 * step_s,
                "time/total_s": total, "progress/samples": step * plan.batch.global_size,
                "batch/global_size": plan.batch.global_size, "batch/micro_size": plan.batch.micro_size,
                "batch/accumulation": plan.batch.accumulation, "batch/world_size": plan.batch.world_size,
                "batch/samples": 3 if step == 5 else plan.batch.global_size,
                "comm/wire_bytes": sent,
                "comm/wire_bytes_every": sent * plan.batch.accumulation,
            }
            | more
        )  # fmt: skip
        if step == 12 and sent:
            made[-1] |= {"comm/exposed_s": 0.1 * step_s, "comm/step_s": step_s}
            if plan.batch.accumulation > 1:
                made[-1] |= {"comm/speedup": 4 / 3, "comm/speedup_low": 1.25, "comm/speedup_high": 1.4}
        if step in (20, steps):
            made[-1]["eval/loss"] = loss + 0.125
    return made


def write_records(paths: RunPaths, lines: Iterable[dict[str, Any]]) -> None:
    paths.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def read_records(paths: RunPaths) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.metrics.read_text().splitlines()]


def cell(run: str | None, *overrides: str, problem: str | None = None) -> Cell:
    return Cell(overrides=overrides, content=run, run=run, problem=problem)


def make_sweep(root: Path, *cells: Cell) -> None:
    from launcher.rundir.paths import SweepPaths

    Sweep(format=1, fixed=(), at_once=None, cells=cells).save(SweepPaths(root))
