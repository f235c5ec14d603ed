"""One run's figures, computed from the files in its directory; metrics.jsonl above all, which every run has.

A run that is under way, or was killed, has a record like any other, so nothing here is read from summary.json.
"""

from __future__ import annotations

import json
import statistics
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

from launcher.interval import Interval
from launcher.paths import RunPaths
from launcher.plan import FORMAT
from launcher.report.comparison.curve import SMOOTH_POINTS, Curve, thinned
from launcher.report.comparison.facts import Facts, facts_of

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
