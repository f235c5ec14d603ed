"""Figures of runs, computed from the files in their directories; metrics.jsonl above all.

A run that is under way, or was killed, has a record like any other, so nothing here is read from summary.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.config.schema import PrecisionKind
from launcher.plan.launch_plan import FORMAT
from launcher.process import die_with_parent
from launcher.quantities import Interval
from launcher.rundir.files import read_json
from launcher.rundir.paths import RunPaths

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


# of a drawn curve: more than a screen has columns for
POINTS = 300
SMOOTH_POINTS = 150


@dataclass(frozen=True)
class Curve:
    """Parallel columns. ``seconds``: of training, wall time."""

    steps: array[float]
    samples: array[float]
    seconds: array[float]
    losses: array[float]


def thinned(
    steps: Sequence[float],
    samples: Sequence[float],
    seconds: Sequence[float],
    losses: Sequence[float],
    points: int = POINTS,
) -> Curve:
    """About ``points`` records: the first and the last, and of each of equally long stretches the one with the lowest
    and the one with the highest loss, so that no spike is lost. A loss that is not finite breaks the curve."""
    count = len(steps)
    kept = range(count) if count <= points else _extremes(losses, count, points // 2 - 1)
    columns = ([column[place] for place in kept] for column in (steps, samples, seconds, losses))
    return Curve(*(array("d", column) for column in columns))


def _extremes(losses: Sequence[float], count: int, stretches: int) -> list[int]:
    kept = {0, count - 1}
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [place for place in places if losses[place] == losses[place]]
        if finite:
            kept |= {min(finite, key=losses.__getitem__), max(finite, key=losses.__getitem__)}
        if len(finite) < len(places):
            kept.add(next(place for place in places if losses[place] != losses[place]))
    return sorted(kept)


# the newest so many logged losses are averaged before a loss counts as reached: one lucky window does not
SMOOTHED_OVER = 10


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of one run's record. Seconds and bytes are medians over the ``windows`` full windows, None without any.

    Args:
        records: lines that were read; damaged: lines that were none.
        since: the step at which the run was resumed under settings that change what a step takes or sends; 0: it
            was not. Figures of steps are of those after it.
        windows: full ones, of the largest global batch.
        exposed_s: as the calibration measured it, perhaps below zero; None where it did not.
        speedup: a step with sync=every by one with the job's policy; speedup_95: the same with its interval, None in
            a record of an older version, which did not measure both under equal conditions.
        loss, smoothed: of the last record; lowest: of all smoothed ones.
        estimated_time: whether the records have no clock, so that wall time was added up from their steps.
        reached_loss, reached_s, reached_step: each smoothed loss that was lower than all before it; when.
    """

    records: int
    damaged: int
    since: int
    windows: int
    step: int
    samples: int
    total_s: float
    step_s: float | None
    data_s: float | None
    exposed_s: float | None
    wire_bytes: float | None
    wire_bytes_every: float | None
    speedup: float | None
    speedup_95: Interval | None
    loss: float | None
    smoothed: float | None
    lowest: float | None
    eval_loss: float | None
    estimated_time: bool
    reached_loss: array[float]
    reached_s: array[float]
    reached_step: array[float]
    curve: Curve
    smooth: Curve
    held_out: Curve

    @property
    def claimed_speedup(self) -> float | None:
        """The speed-up, where its interval excludes 1."""
        return self.speedup_95.value if self.speedup_95 is not None and self.speedup_95.excludes(1) else None

    def reached(self, loss: float) -> tuple[int, float] | None:
        """The first step at which the smoothed loss was ``loss`` or lower, and the wall seconds until then."""
        place = bisect_left(self.reached_loss, -loss, key=lambda value: -value)
        if place == len(self.reached_loss):
            return None
        return int(self.reached_step[place]), self.reached_s[place]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """``problem``: why ``facts`` or ``measured`` is None."""

    facts: Facts | None
    measured: Measured | None
    problem: str = ""


def read(paths: RunPaths) -> Figures:
    """Never raises: what cannot be read is said."""
    try:
        plan = json.loads(paths.plan.read_text(encoding="utf-8"))
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
            return Figures(facts=None, measured=None, problem="its plan was written by another version of launcher")
        if "batch" not in plan:
            return Figures(facts=None, measured=None, problem="a script of its own, which leaves no record")
        facts = facts_of(plan, paths)  # pyright: ignore[reportUnknownArgumentType]
    except FileNotFoundError as error:
        name = str(error.filename).rpartition("/")[2]
        return Figures(facts=None, measured=None, problem=f"its {name} is not there")
    except Exception as error:  # whatever another version, or a damaged disk, has left there
        words = str(error).partition("\n")[0]
        return Figures(facts=None, measured=None, problem=f"unreadable: {type(error).__name__}: {words}")
    try:
        measured = _measured(paths)
    except OSError as error:
        return Figures(facts=facts, measured=None, problem=f"unreadable: {error.strerror}: metrics.jsonl")
    return Figures(facts=facts, measured=measured, problem="" if measured else "nothing was recorded")


class _Reading:
    """The columns of a record that figures are made of."""

    def __init__(self) -> None:
        self.steps, self.samples, self.seconds, self.losses = (array("d") for _ in range(4))
        self.held_out: list[tuple[float, float, float, float]] = []
        self.full: list[tuple[float, float, float, float]] = []  # wire bytes, with sync=every; step, data seconds
        self.last: dict[str, Any] = {}
        self.calibrated: dict[str, Any] = {}
        self.damaged = 0
        self.estimated = False
        self.since = 0
        self._global_size = 0

    def take(self, record: dict[str, Any]) -> None:
        """Everything is looked up before anything is kept, so that a line that is no record changes nothing."""
        step, elapsed, estimated = record["step"], record.get("time/total_s"), False
        if elapsed is None:  # of an older version: the steps in between took as long as this one
            before = self.last.get("step", 0)
            elapsed = (self.seconds[-1] if self.seconds else 0.0) + record["time/step_s"] * (step - before)
            estimated = True
        loss, held_out = record.get("train/loss"), record.get("eval/loss")
        point = (float(step), float(record["progress/samples"]), float(elapsed))
        window = (
            record["comm/wire_bytes"],
            record["comm/wire_bytes_every"],
            record["time/step_s"],
            record["time/data_s"],
        )
        value = float("nan") if loss is None else float(loss)
        if (since := record.get("progress/measured_since", 0)) != self.since:
            self.since, self._global_size = since, 0
            self.full.clear()
            self.calibrated.clear()
        if record["batch/global_size"] > self._global_size:  # a ramp has come one stage further
            self._global_size = record["batch/global_size"]
            self.full.clear()
        if record["batch/samples"] == self._global_size:
            self.full.append(window)
        for column, number in zip((self.steps, self.samples, self.seconds), point, strict=True):
            column.append(number)
        self.losses.append(value)
        if held_out is not None:
            self.held_out.append((*point, held_out))
        if "comm/step_s" in record or "comm/exposed_s" in record:
            self.calibrated |= record
        self.last = record
        self.estimated = self.estimated or estimated


def _measured(paths: RunPaths) -> Measured | None:
    import orjson  # here, for `launch runs` answers without it

    reading = _Reading()
    try:
        with paths.metrics.open("rb") as file:
            for line in file:
                try:
                    reading.take(orjson.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    # a run that is under way may have half a last line, which is no damage
                    reading.damaged += line.endswith(b"\n")
    except FileNotFoundError:
        return None
    return _sum_up(reading) if reading.last else None


def _sum_up(reading: _Reading) -> Measured:
    full, last = reading.full, reading.last
    smoothed = _smoothed(reading.losses)
    reached = [array("d") for _ in range(3)]
    lowest = float("inf")
    for place, loss in enumerate(smoothed):
        if loss < lowest:
            lowest = loss
            for column, value in zip(reached, (loss, reading.seconds[place], reading.steps[place]), strict=True):
                column.append(value)
    exposed = reading.calibrated.get("comm/exposed_s")
    if last["batch/world_size"] == 1:
        exposed = 0.0
    held_out = [[point[column] for point in reading.held_out] for column in range(4)]
    return Measured(
        records=len(reading.steps),
        damaged=reading.damaged,
        since=int(reading.since),
        windows=len(full),
        step=int(last["step"]),
        samples=int(last["progress/samples"]),
        total_s=reading.seconds[-1],
        step_s=_median([window[2] for window in full]),
        data_s=_median([window[3] for window in full]),
        exposed_s=exposed,
        wire_bytes=_median([window[0] for window in full]),
        wire_bytes_every=_median([window[1] for window in full]),
        speedup=reading.calibrated.get("comm/speedup"),
        speedup_95=Interval.of_record(reading.calibrated, "comm/speedup"),
        loss=last.get("train/loss"),
        smoothed=smoothed[-1] if smoothed and smoothed[-1] == smoothed[-1] else None,
        lowest=lowest if reached[0] else None,
        eval_loss=reading.held_out[-1][3] if reading.held_out else None,
        estimated_time=reading.estimated,
        reached_loss=reached[0],
        reached_s=reached[1],
        reached_step=reached[2],
        curve=thinned(reading.steps, reading.samples, reading.seconds, reading.losses),
        smooth=thinned(reading.steps, reading.samples, reading.seconds, smoothed, SMOOTH_POINTS),
        held_out=thinned(held_out[0], held_out[1], held_out[2], held_out[3]),
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _smoothed(losses: array[float]) -> list[float]:
    """The mean of the newest SMOOTHED_OVER finite losses at each record; nan before the first of them."""
    newest: deque[float] = deque(maxlen=SMOOTHED_OVER)
    means: list[float] = []
    for loss in losses:
        if loss == loss:
            newest.append(loss)
        means.append(sum(newest) / len(newest) if newest else float("nan"))
    return means


# below so many bytes of records the processes take longer to begin than to read
_ALONE_BYTES = 30_000_000


def read_all(runs: Sequence[Path]) -> dict[Path, Figures]:
    """The figures of each of these directories."""
    sizes = {run: _size(run) for run in runs}
    cores = min(len(os.sched_getaffinity(0)), len(sizes))
    if cores < 2 or sum(sizes.values()) < _ALONE_BYTES:
        return {run: _read(run) for run in sizes}
    largest_first = sorted(sizes, key=lambda run: -sizes[run])
    # spawned: a forked process would have the locks that some other thread of this one happens to hold
    # without the initializer each would outlive this process: it holds both ends of its own queue, which never closes
    context, end = multiprocessing.get_context("spawn"), partial(die_with_parent, os.getpid())
    with ProcessPoolExecutor(cores, mp_context=context, initializer=end) as pool:
        return dict(zip(largest_first, pool.map(_read, largest_first), strict=True))


def _read(run: Path) -> Figures:
    return read(RunPaths(run))


def _size(run: Path) -> int:
    try:
        return RunPaths(run).metrics.stat().st_size
    except OSError:
        return 0
