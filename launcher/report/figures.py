"""Figures of runs, from the files in their directories, and not from summary.json, which only finished runs have."""

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

# groups that name a run or configure its mirror; they do not affect measurements
_NO_SETTINGS = ("run.", "wandb.", "sweep.", "hydra.")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Decisions made before the start.

    Attributes:
        steps: planned steps; None for a stream.
        settings: flattened config.yaml, with solved values in place of those left open.
    """

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
    """Return the facts in ``plan``, the object in plan.json.

    Raises:
        OSError, KeyError and similar: the files were written by another version.
    """
    batch, cluster, run = plan["batch"], plan["cluster"], plan["run"]
    solved = {f"cluster.{name}": cluster[name] for name in ("workers_per_node", "device")}
    if cluster.get("min_nodes") is None:  # a range is shown as configured
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

    # the C loader is ten times as fast, but not in every build
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


# points per drawn curve; more could not be distinguished on a screen
POINTS = 300
SMOOTH_POINTS = 150


@dataclass(frozen=True)
class Curve:
    """Parallel columns of a curve. ``seconds``: wall time of training."""

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
    """Return about ``points`` records: first, last, and the lowest and highest loss of each of equally long stretches.

    No spike is lost. A loss that is not finite interrupts the curve.
    """
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


# number of latest logged losses to average, so that one lucky window does not count as reaching a loss
SMOOTHED_OVER = 10


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of one run's record. Seconds and bytes are medians over the ``windows`` full windows; None without any.

    Attributes:
        records: lines read.
        damaged: lines that could not be parsed.
        since: step after which the run was resumed with settings that change a step's time or traffic; 0: never.
            Figures
            of steps cover the steps after it.
        windows: full windows of the largest global batch.
        exposed_s: measured by the calibration, possibly below zero; None if not measured.
        speedup: step time with sync=every divided by that of the job's policy.
        speedup_95: the same with its interval; None in records of an older version, which did not measure both under
            equal conditions.
        loss, smoothed: of the last record.
        lowest: lowest smoothed loss.
        estimated_time: whether the records lack a clock, so that wall time is the sum of their steps.
        reached_loss, reached_s, reached_step: each new minimum of the smoothed loss, with its wall time and step.
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
        """Return the speed-up if its interval excludes 1."""
        return self.speedup_95.value if self.speedup_95 is not None and self.speedup_95.excludes(1) else None

    def reached(self, loss: float) -> tuple[int, float] | None:
        """Return (step, wall seconds) at which the smoothed loss first was ``loss`` or lower; None if never."""
        place = bisect_left(self.reached_loss, -loss, key=lambda value: -value)
        if place == len(self.reached_loss):
            return None
        return int(self.reached_step[place]), self.reached_s[place]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Facts and measurements of a run. ``problem``: why either is None."""

    facts: Facts | None
    measured: Measured | None
    problem: str = ""


def read(paths: RunPaths) -> Figures:
    """Return the figures of a run. Never raises: errors are described in ``problem``."""
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
    except Exception as error:  # any content is possible: another version, a damaged disk
        words = str(error).partition("\n")[0]
        return Figures(facts=None, measured=None, problem=f"unreadable: {type(error).__name__}: {words}")
    try:
        measured = _measured(paths)
    except OSError as error:
        return Figures(facts=facts, measured=None, problem=f"unreadable: {error.strerror}: metrics.jsonl")
    return Figures(facts=facts, measured=measured, problem="" if measured else "nothing was recorded")


class _Reading:
    """Columns of a record from which figures are computed."""

    def __init__(self) -> None:
        self.steps, self.samples, self.seconds, self.losses = (array("d") for _ in range(4))
        self.held_out: list[tuple[float, float, float, float]] = []
        self.full: list[tuple[float, float, float, float]] = []  # wire bytes, those of sync=every; step, data seconds
        self.last: dict[str, Any] = {}
        self.calibrated: dict[str, Any] = {}
        self.damaged = 0
        self.estimated = False
        self.since = 0
        self._global_size = 0.0

    def take(self, record: dict[str, Any]) -> None:
        """Add a record. Fields are looked up before the columns change, so that an invalid line adds nothing."""
        step, elapsed, estimated = record["step"], record.get("time/total_s"), False
        if elapsed is None:  # older version: assume that the steps since the previous record took as long as this one
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
        global_size, samples = float(record["batch/global_size"]), float(record["batch/samples"])
        if (since := record.get("progress/measured_since", 0)) != self.since:
            self.since, self._global_size = since, 0.0
            self.full.clear()
            self.calibrated.clear()
        if global_size > self._global_size:  # the ramp has reached its next stage
            self._global_size = global_size
            self.full.clear()
        if samples == self._global_size:
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
    import orjson  # not at module level: `launch runs` works without it

    reading = _Reading()
    try:
        with paths.metrics.open("rb") as file:
            for line in file:
                try:
                    reading.take(orjson.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    # an incomplete last line of an active run is not damage
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
    """Return, for each record, the mean of the latest SMOOTHED_OVER finite losses; nan before the first."""
    newest: deque[float] = deque(maxlen=SMOOTHED_OVER)
    means: list[float] = []
    for loss in losses:
        if loss == loss:
            newest.append(loss)
        means.append(sum(newest) / len(newest) if newest else float("nan"))
    return means


# below this many bytes of records, starting processes takes longer than reading
_ALONE_BYTES = 30_000_000


def read_all(runs: Sequence[Path]) -> dict[Path, Figures]:
    """Return the figures of each directory in ``runs``."""
    sizes = {run: _size(run) for run in runs}
    cores = min(len(os.sched_getaffinity(0)), len(sizes))
    if cores < 2 or sum(sizes.values()) < _ALONE_BYTES:
        return {run: _read(run) for run in sizes}
    largest_first = sorted(sizes, key=lambda run: -sizes[run])
    # spawn: a forked process would inherit locks that another thread of this one may hold
    # initializer: without it a worker would outlive this process, because it holds both ends of its own queue
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
